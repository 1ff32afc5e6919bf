"""Other queues, each as its documentation says it is fastest. They run in an environment and in processes of their own,
and never meet the product."""

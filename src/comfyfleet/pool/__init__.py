"""`WorkflowPool`: an engine on a store and one agent for each server, in one process."""

"""Input and output files, on disk or in S3, and short-lived links to them."""

"""Files at a hub: upload and download handlers, and the files of jobs."""

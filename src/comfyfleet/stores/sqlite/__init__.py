"""The SQLite store (`store.py`), and maintenance of its file (`maintenance.py`)."""

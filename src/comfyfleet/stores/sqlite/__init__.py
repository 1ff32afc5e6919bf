"""The SQLite store (`store.py`), and what an operator does to its file (`maintenance.py`)."""

"""What the memory and the SQLite store share: open jobs in this process, their lanes, shares and blocks."""

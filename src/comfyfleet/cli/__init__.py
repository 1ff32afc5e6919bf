"""The command line: one file a noun. It parses, calls and prints; everything else is done by the packages below."""

"""The command line: one module for a group of related commands. A command reads its flags, calls `FleetClient` or
starts a part such as the hub, and prints. The other packages do the work."""

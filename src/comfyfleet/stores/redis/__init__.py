"""The Redis (or Valkey) store: a function library on the server, a small multiplexing client, and the port on top."""

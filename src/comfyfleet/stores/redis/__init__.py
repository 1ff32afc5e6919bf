"""The store on Redis or Valkey: a function library on the server, a multiplexing client, and the port."""

"""Event streams: feeds, job channels, and Server-Sent Events."""

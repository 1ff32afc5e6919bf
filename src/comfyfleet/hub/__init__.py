"""The hub: the job API and the worker API of an engine over HTTP and WebSocket. No policy, no SQL."""

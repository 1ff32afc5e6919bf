"""The ACL rules of docs/redis-protocol.md, for users of engines and of direct workers."""

from __future__ import annotations

from comfyfleet.stores.redis.address import document_key
from comfyfleet.stores.redis.pubsub import EVENT_CHANNEL

WORKER_FUNCTIONS = (
    "cf1_revision",
    "cf1_worker_register",
    "cf1_worker_leave",
    "cf1_worker_lease_next",
    "cf1_worker_heartbeat",
    "cf1_worker_progress",
    "cf1_worker_complete",
    "cf1_worker_release",
    "cf1_worker_fail",
)
# The commands inside those functions; none reads or removes much at once.
_INSIDE = (
    *("get", "set", "mget", "mset", "append", "del", "exists", "expire", "time", "publish"),
    *("hget", "hset", "hdel", "hexists", "hincrby", "rpush", "ltrim", "xadd"),
    *("smembers", "sadd", "srem", "sinter"),
    *("zadd", "zrem", "zcard", "zrange", "zrangebyscore", "zremrangebyscore", "zrandmember", "zmscore"),
)


def engine_rules(prefix: str) -> tuple[str, ...]:
    """ACL rules of a hub's or agent's user: all of this fleet, the library, no other settings."""
    server = ("-@admin", "-@dangerous", "+info", "+config|get", "+function|load")
    return (f"~{prefix}*", f"~{document_key(prefix)}*", f"&{prefix}*", "+@all", *server)


def worker_rules(prefix: str) -> tuple[str, ...]:
    """Rules for `ACL SETUSER <worker> reset on ><password> …`."""
    functions = (f"+fcall|{name}" for name in WORKER_FUNCTIONS)
    inside = (f"+{name}" for name in _INSIDE)
    # Its own commands: hints, and the stream of its commands.
    reading = ("+subscribe", "+unsubscribe", "+xread", "+ping")
    channels = (f"&{prefix}{EVENT_CHANNEL}", f"&{prefix}channel:worker:*", f"&{prefix}channel:workers:all")
    return (f"~{prefix}*", *channels, *functions, "+fcall_ro|cf1_revision", *inside, *reading)

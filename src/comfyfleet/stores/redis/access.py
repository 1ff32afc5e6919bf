"""What a Redis user may do: that of an engine, and that of a worker which has none.

Functions run with the rights of whoever calls them, so the commands they use must be allowed too, on this fleet's keys.
A worker's user can therefore not harm another fleet or the server, but it is trusted with this one's jobs. The cabinet
(keys, grants, the audit log) is not under the prefix and not its to see.
"""

from __future__ import annotations

from comfyfleet.stores.redis.address import cabinet_key
from comfyfleet.stores.redis.listening import CHANNEL

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
# What those functions do inside, and nothing that reads or removes much at once.
_INSIDE = (
    *("get", "set", "mget", "mset", "append", "del", "exists", "expire", "time", "publish"),
    *("hget", "hset", "hdel", "hexists", "hincrby", "rpush", "ltrim", "xadd"),
    *("smembers", "sadd", "srem", "sinter"),
    *("zadd", "zrem", "zcard", "zrange", "zrangebyscore", "zremrangebyscore", "zrandmember", "zmscore"),
)


def engine_rules(prefix: str) -> tuple[str, ...]:
    """Rules for the user of a hub or an agent with an engine: all of this fleet, the library, no other settings."""
    server = ("-@admin", "-@dangerous", "+info", "+config|get", "+function|load")
    return (f"~{prefix}*", f"~{cabinet_key(prefix)}*", f"&{prefix}*", "+@all", *server)


def worker_rules(prefix: str) -> tuple[str, ...]:
    """Rules for `ACL SETUSER <worker> reset on ><password> …`."""
    functions = (f"+fcall|{name}" for name in WORKER_FUNCTIONS)
    inside = (f"+{name}" for name in _INSIDE)
    # What it does by itself: hints, and the stream of its commands.
    reading = ("+subscribe", "+unsubscribe", "+xread", "+ping")
    channels = (f"&{prefix}{CHANNEL}", f"&{prefix}channel:worker:*", f"&{prefix}channel:workers:all")
    return (f"~{prefix}*", *channels, *functions, "+fcall_ro|cf1_revision", *inside, *reading)

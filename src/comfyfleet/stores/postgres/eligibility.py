"""The table profile × class: which profile may take which class. Its version grows with each addition."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from comfyfleet.model.ids import ClassKey, ProfileKey
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.ports import EligibilityMatrix
from comfyfleet.stores.inprocess.lane_index import MAX_IDLE_CLASSES
from comfyfleet.stores.postgres import codec
from comfyfleet.stores.postgres.connections import SqlStep

# One statement, so that version and contents match.
_READ = """
SELECT 0 AS part, NULL AS key, NULL::json AS body, table_version AS number FROM comfyfleet.state
UNION ALL SELECT 1, class_key, body, number FROM comfyfleet.classes
UNION ALL SELECT 2, profile, NULL, 0 FROM comfyfleet.profiles
ORDER BY part, number
"""

_RAISE_VERSION = """
UPDATE comfyfleet.state SET table_version = table_version + 1 WHERE table_version = %s RETURNING table_version
"""

_IS_IDLE = """
NOT EXISTS (SELECT FROM comfyfleet.dispatches d WHERE d.class_key = c.class_key)
AND NOT EXISTS (SELECT FROM comfyfleet.dispatches d WHERE d.relaxed_class = c.class_key)
"""

_EXCESS = f"""
SELECT c.class_key FROM comfyfleet.classes c WHERE {_IS_IDLE} ORDER BY c.number LIMIT greatest(
    (SELECT count(*) FROM comfyfleet.classes c WHERE {_IS_IDLE}) - %s, 0)
FOR UPDATE OF c SKIP LOCKED
"""

_DROP = f"DELETE FROM comfyfleet.classes c WHERE c.class_key = ANY (%s) AND {_IS_IDLE} RETURNING c.class_key"


async def read(step: SqlStep) -> EligibilityMatrix:
    version = 0
    classes: dict[ClassKey, RequirementClass] = {}
    profiles: set[ProfileKey] = set()
    for part, key, body, number in await step.rows(_READ):
        if part == 0:
            version = number
        elif part == 1:
            classes[ClassKey(key)] = codec.decode_class(body)
        else:
            profiles.add(ProfileKey(key))
    return EligibilityMatrix(version, MappingProxyType(classes), frozenset(profiles))


async def _raise_version(step: SqlStep, version: int) -> bool:
    """Locks the row until the end: additions to the table are serialized."""
    return await step.row(_RAISE_VERSION, (version,)) is not None


async def put_class(step: SqlStep, cls: RequirementClass, fits: Collection[ProfileKey], version: int) -> bool:
    if not await _raise_version(step, version):
        return False
    key = cls.key
    found = await step.row(
        "UPDATE comfyfleet.classes SET body = %s WHERE class_key = %s RETURNING class_key",
        (codec.encode(cls), key),
    )
    if found is not None:
        return True
    step.add("INSERT INTO comfyfleet.classes (class_key, body) VALUES (%s, %s)", (key, codec.encode(cls)))
    step.add(
        "INSERT INTO comfyfleet.profile_classes (profile, class_key) "
        "SELECT profile, %s FROM comfyfleet.profiles WHERE profile = ANY (%s)",
        (key, list(fits)),
    )
    await _drop_idle(step)
    return True


async def _drop_idle(step: SqlStep) -> None:
    """Keeps a bounded number of idle classes."""
    row = await step.row("SELECT count(*) FROM comfyfleet.classes")
    if row is None or row[0] <= MAX_IDLE_CLASSES:
        return
    excess = [key for (key,) in await step.rows(_EXCESS, (MAX_IDLE_CLASSES,))]
    # Check again under the lock: a job may have arrived.
    dropped = [key for (key,) in await step.rows(_DROP, (excess,))]
    step.add("DELETE FROM comfyfleet.profile_classes WHERE class_key = ANY (%s)", (dropped,))


async def put_profile(
    step: SqlStep, profile: ProfileKey, fits: Collection[ClassKey], *, version: int
) -> bool:
    if not await _raise_version(step, version):
        return False
    found = await step.row(
        "INSERT INTO comfyfleet.profiles (profile) VALUES (%s) ON CONFLICT DO NOTHING RETURNING profile",
        (profile,),
    )
    if found is not None:
        step.add(
            "INSERT INTO comfyfleet.profile_classes (profile, class_key) "
            "SELECT %s, class_key FROM comfyfleet.classes WHERE class_key = ANY (%s)",
            (profile, list(fits)),
        )
    return True


async def drop_profiles(step: SqlStep, unused: Collection[ProfileKey]) -> None:
    # Additions lock this row, too: a new class must not go to a profile that is being dropped.
    step.add("SELECT FROM comfyfleet.state FOR UPDATE")
    step.add("DELETE FROM comfyfleet.profiles WHERE profile = ANY (%s)", (list(unused),))
    step.add("DELETE FROM comfyfleet.profile_classes WHERE profile = ANY (%s)", (list(unused),))

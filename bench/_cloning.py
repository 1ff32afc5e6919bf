"""A long queue in PostgreSQL in seconds: a job the store has enqueued is copied row by row inside the database.

Whatever tables know a job are copied, so nothing here depends on their columns; that the store then counts as many
waiting jobs as it should is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

# A sequence number that stands nowhere else, so that it can be found in the text of a row.
_FIRST = 700_000_000_000

_TABLES = """
SELECT table_name FROM information_schema.columns WHERE table_schema = 'comfyfleet' AND column_name = 'job_id'
"""

# A row as text, its id and its place in line replaced wherever they stand, and back. OFFSET 0 keeps the server from
# doing it again for each column.
_COPY = """
INSERT INTO comfyfleet.{table} SELECT (made.copy).* FROM (
    SELECT replace(replace(t::text, %(job_id)s, '01a00000-0000-7000-8000-' || lpad(to_hex(n), 12, '0')),
        %(sequence)s, n::text)::comfyfleet.{table} AS copy
    FROM comfyfleet.{table} t, generate_series(%(first)s::bigint, %(last)s::bigint, %(step)s) n
    WHERE t.job_id = %(job_id)s OFFSET 0
) made
"""


def mark_sequence(url: str) -> None:
    """Before the jobs that are to be copied come."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT setval('comfyfleet.job_sequence', %s)", [_FIRST])


def copy_jobs(url: str, originals: Sequence[tuple[str, int]], copies: int) -> None:
    """So many of each (id, place in line); all of them in turn, after everything that waits."""
    with psycopg.connect(url, autocommit=True) as connection:
        tables = [row[0] for row in connection.execute(_TABLES.encode()).fetchall()]
        last = connection.execute("SELECT nextval('comfyfleet.job_sequence')").fetchone()
        assert last is not None
        with connection.transaction():
            for place, (job_id, sequence) in enumerate(originals, start=1):
                first = last[0] + place
                values = {
                    "job_id": job_id,
                    "sequence": str(sequence),
                    "first": first,
                    "last": first + (copies - 1) * len(originals),
                    "step": len(originals),
                }
                for table in tables:
                    connection.execute(_COPY.format(table=table).encode(), values)
            added = copies * len(originals)
            connection.execute(
                "UPDATE comfyfleet.tallies SET in_lane = in_lane + %s, queued = queued + %s WHERE shard = 0",
                [added, added],
            )
            connection.execute("SELECT setval('comfyfleet.job_sequence', %s)", [last[0] + added + 1])
        # What the server does by itself a little later.
        connection.execute("VACUUM (ANALYZE)")

-- A tenant may go to another pool, or for good. Its book is closed first: while there is a fence nothing is written for
-- it, and its rows may go. Postings and runs are numbered 1, 2, 3 … for each tenant, and keep their numbers on the way.

ALTER TABLE accounts ADD COLUMN fence INTEGER;

CREATE TABLE numbered_postings (
    tenant TEXT NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL,
    balance INTEGER NOT NULL,
    held INTEGER NOT NULL,
    at REAL NOT NULL,
    reference TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (tenant, number),
    UNIQUE (tenant, kind, reference)
) WITHOUT ROWID;

INSERT INTO numbered_postings
SELECT tenant, row_number() OVER (PARTITION BY tenant ORDER BY number), kind, balance, held, at, reference, note
FROM postings;

DROP TABLE postings;
ALTER TABLE numbered_postings RENAME TO postings;

CREATE TABLE numbered_runs (
    tenant TEXT NOT NULL,
    number INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    workflow_hash TEXT NOT NULL,
    service TEXT NOT NULL,
    phase TEXT NOT NULL,
    at REAL NOT NULL,
    worker_id TEXT,
    outputs INTEGER NOT NULL,
    gpu_milliseconds INTEGER NOT NULL,
    consumed INTEGER NOT NULL,
    cost_micros INTEGER,
    verified_by TEXT NOT NULL,
    PRIMARY KEY (tenant, number),
    UNIQUE (job_id, round)
) WITHOUT ROWID;

INSERT INTO numbered_runs
SELECT tenant, row_number() OVER (PARTITION BY tenant ORDER BY number), job_id, round, workflow_hash, service, phase, at,
    worker_id, outputs, gpu_milliseconds, consumed, cost_micros, verified_by
FROM runs;

DROP TABLE runs;
ALTER TABLE numbered_runs RENAME TO runs;
CREATE INDEX runs_by_time ON runs (tenant, at);

-- Entries are only ever added, unless their tenant goes.
DROP TRIGGER settlements_remain;
CREATE TRIGGER postings_stay BEFORE UPDATE ON postings BEGIN SELECT raise(ABORT, 'postings are only ever added'); END;
CREATE TRIGGER postings_remain BEFORE DELETE ON postings
WHEN NOT EXISTS (SELECT 1 FROM accounts a WHERE a.tenant = OLD.tenant AND a.fence IS NOT NULL)
BEGIN SELECT raise(ABORT, 'postings are only ever added'); END;
CREATE TRIGGER settlements_remain BEFORE DELETE ON settlements
WHEN NOT EXISTS (
    SELECT 1 FROM holds h JOIN accounts a ON a.tenant = h.tenant
    WHERE h.job_id = OLD.job_id AND h.round = OLD.round AND a.fence IS NOT NULL
)
BEGIN SELECT raise(ABORT, 'settlements are final'); END;

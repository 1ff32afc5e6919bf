-- What a round is charged by, what an attempt left before it was reported, and what ended rounds took.

ALTER TABLE rounds ADD COLUMN price TEXT;

CREATE TABLE staged (
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    result BLOB NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (job_id, round, attempt_id)
) WITHOUT ROWID;

CREATE TABLE runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    tenant TEXT NOT NULL,
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
    UNIQUE (job_id, round)
);

CREATE INDEX runs_by_tenant ON runs (tenant, number);
CREATE INDEX runs_by_time ON runs (tenant, at);

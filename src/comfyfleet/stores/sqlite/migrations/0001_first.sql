-- Everything about a job hangs on its sequence: a small whole number, so that rows that belong together in time lie
-- together on disk. What is read with each lease (dispatches) is small; payloads and results stand apart.

CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

INSERT INTO meta VALUES ('sequence', 0), ('table_version', 0), ('is_paused', 0);

CREATE TABLE dispatches (
    sequence INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    reference TEXT,
    phase TEXT NOT NULL,
    fact_count INTEGER NOT NULL,
    ending INTEGER, -- the number of its end, NULL while the job is open
    ended_at REAL,
    dispatch BLOB NOT NULL,
    facts BLOB NOT NULL, -- one after the other; there are `fact_count` of them
    attempts BLOB,
    changes BLOB -- what the job's record says differently by now
);

CREATE UNIQUE INDEX dispatches_by_reference ON dispatches (tenant, reference) WHERE reference IS NOT NULL;

CREATE INDEX dispatches_open ON dispatches (sequence) WHERE ending IS NULL;

CREATE INDEX dispatches_ended ON dispatches (phase, ending) WHERE ending IS NOT NULL;

CREATE TABLE jobs (sequence INTEGER PRIMARY KEY, job BLOB NOT NULL); -- as submitted

CREATE TABLE results (sequence INTEGER PRIMARY KEY, result BLOB NOT NULL);

CREATE TABLE classes (class_key TEXT NOT NULL UNIQUE, definition BLOB NOT NULL);

CREATE TABLE profiles (profile_key TEXT NOT NULL UNIQUE);

CREATE TABLE fits (class_key TEXT NOT NULL, profile_key TEXT NOT NULL, PRIMARY KEY (class_key, profile_key)) WITHOUT ROWID;

CREATE INDEX fits_by_profile ON fits (profile_key);

CREATE TABLE workers (worker_id TEXT NOT NULL UNIQUE, record BLOB NOT NULL);

CREATE TABLE blocks (worker_id TEXT NOT NULL, target TEXT NOT NULL, block BLOB NOT NULL, UNIQUE (worker_id, target));

CREATE TABLE lessons (workflow_hash TEXT NOT NULL UNIQUE, lesson BLOB NOT NULL);

CREATE TABLE tenants (tenant TEXT PRIMARY KEY, virtual_time REAL NOT NULL) WITHOUT ROWID;

-- A job as a change leaves it, with its payload when it is new and its result when that changes (0: there is none any
-- more). One insert of many rows here is a whole transaction: the writer says it in one statement.
CREATE VIEW changed_jobs AS
SELECT sequence, job_id, tenant, reference, phase, fact_count, ending, ended_at, dispatch, facts, attempts, changes, job, result
FROM dispatches JOIN jobs USING (sequence) LEFT JOIN results USING (sequence);

CREATE TRIGGER changed_jobs_are_written INSTEAD OF INSERT ON changed_jobs BEGIN
    INSERT INTO dispatches
    VALUES (
        NEW.sequence, NEW.job_id, NEW.tenant, NEW.reference, NEW.phase, NEW.fact_count, NEW.ending, NEW.ended_at,
        NEW.dispatch, NEW.facts, NEW.attempts, NEW.changes
    )
    ON CONFLICT (sequence) DO UPDATE SET
        phase = excluded.phase, fact_count = excluded.fact_count, ending = excluded.ending, ended_at = excluded.ended_at,
        dispatch = excluded.dispatch, facts = excluded.facts, attempts = excluded.attempts, changes = excluded.changes;
    INSERT INTO jobs SELECT NEW.sequence, NEW.job WHERE NEW.job IS NOT NULL;
    UPDATE meta SET value = NEW.sequence WHERE NEW.job IS NOT NULL AND name = 'sequence' AND value < NEW.sequence;
    INSERT OR REPLACE INTO results SELECT NEW.sequence, NEW.result WHERE NEW.result <> 0;
    DELETE FROM results WHERE NEW.result = 0 AND sequence = NEW.sequence;
END;

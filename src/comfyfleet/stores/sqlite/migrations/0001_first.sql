-- Everything about a job hangs on its sequence: a small whole number, so that rows that belong together in time lie
-- together on disk. What a lease writes (open_jobs) is one small row without an index; what was submitted and what came
-- of it stand apart, and so do the jobs that have ended: a restart reads the open ones and nothing else.

CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

-- sequence: no place up to it is given again, though its job may be purged
INSERT INTO meta VALUES ('sequence', 0), ('table_version', 0), ('is_paused', 0);

CREATE TABLE jobs (
    sequence INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    reference TEXT,
    job BLOB NOT NULL -- as submitted
);

CREATE UNIQUE INDEX jobs_by_reference ON jobs (tenant, reference) WHERE reference IS NOT NULL;

CREATE TABLE open_jobs (sequence INTEGER PRIMARY KEY, phase TEXT NOT NULL, state BLOB NOT NULL);

CREATE TABLE ended_jobs (
    sequence INTEGER PRIMARY KEY,
    phase TEXT NOT NULL,
    ending INTEGER NOT NULL, -- the number of its end
    ended_at REAL NOT NULL,
    state BLOB NOT NULL
);

CREATE INDEX ended_jobs_by_ending ON ended_jobs (phase, ending);

CREATE TABLE results (sequence INTEGER PRIMARY KEY, result BLOB NOT NULL);

CREATE TABLE classes (class_key TEXT NOT NULL UNIQUE, definition BLOB NOT NULL);

CREATE TABLE profiles (profile_key TEXT NOT NULL UNIQUE);

CREATE TABLE fits (class_key TEXT NOT NULL, profile_key TEXT NOT NULL, PRIMARY KEY (class_key, profile_key)) WITHOUT ROWID;

CREATE INDEX fits_by_profile ON fits (profile_key);

CREATE TABLE workers (worker_id TEXT NOT NULL UNIQUE, record BLOB NOT NULL);

CREATE TABLE blocks (worker_id TEXT NOT NULL, target TEXT NOT NULL, block BLOB NOT NULL, UNIQUE (worker_id, target));

CREATE TABLE lessons (workflow_hash TEXT NOT NULL UNIQUE, lesson BLOB NOT NULL);

CREATE TABLE tenants (tenant TEXT PRIMARY KEY, virtual_time REAL NOT NULL) WITHOUT ROWID;

-- small documents beside the queue: keys, enrolments, the audit log
CREATE TABLE documents (
    drawer TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (drawer, name)
);

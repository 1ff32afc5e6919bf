-- What a worker reported of each attempt that failed, in the server's own words. It goes with its job.

CREATE TABLE failures (
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    failure BLOB NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (job_id, round, attempt_id)
) WITHOUT ROWID;

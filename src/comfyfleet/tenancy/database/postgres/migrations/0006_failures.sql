-- What a worker reported of each attempt that failed, in the server's own words. It goes with its job.

CREATE TABLE comfyfleet_tenants.failures (
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    failure bytea NOT NULL,
    at double precision NOT NULL,
    PRIMARY KEY (job_id, round, attempt_id)
);

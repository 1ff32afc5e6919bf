-- What a round is charged by, what an attempt left before it was reported, and what ended rounds took.

ALTER TABLE comfyfleet_tenants.rounds ADD COLUMN price text;

CREATE TABLE comfyfleet_tenants.staged (
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    attempt_id text NOT NULL,
    result bytea NOT NULL,
    at double precision NOT NULL,
    PRIMARY KEY (job_id, round, attempt_id)
);

CREATE TABLE comfyfleet_tenants.runs (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    tenant text NOT NULL,
    workflow_hash text NOT NULL,
    service text NOT NULL,
    phase text NOT NULL,
    at double precision NOT NULL,
    worker_id text,
    outputs bigint NOT NULL,
    gpu_milliseconds bigint NOT NULL,
    consumed bigint NOT NULL,
    cost_micros bigint,
    verified_by text NOT NULL,
    UNIQUE (job_id, round)
);

CREATE INDEX runs_by_tenant ON comfyfleet_tenants.runs (tenant, number);
CREATE INDEX runs_by_time ON comfyfleet_tenants.runs (tenant, at);

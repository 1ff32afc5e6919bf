-- A tenant may go to another pool, or for good. Its book is closed first: while there is a fence nothing is written for
-- it, and its rows may go. Postings and runs are numbered 1, 2, 3 … for each tenant, and keep their numbers on the way.

ALTER TABLE comfyfleet_tenants.accounts ADD COLUMN fence bigint;

-- As in every other database: rows are compared in the order of their keys.
ALTER TABLE comfyfleet_tenants.staged ALTER COLUMN attempt_id TYPE text COLLATE "C";

CREATE TABLE comfyfleet_tenants.numbered_postings (
    tenant text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    kind text NOT NULL,
    balance bigint NOT NULL,
    held bigint NOT NULL,
    at double precision NOT NULL,
    reference text NOT NULL,
    note text NOT NULL,
    PRIMARY KEY (tenant, number),
    UNIQUE (tenant, kind, reference)
);

INSERT INTO comfyfleet_tenants.numbered_postings
SELECT tenant, row_number() OVER (PARTITION BY tenant ORDER BY number), kind, balance, held, at, reference, note
FROM comfyfleet_tenants.postings;

DROP TABLE comfyfleet_tenants.postings;
ALTER TABLE comfyfleet_tenants.numbered_postings RENAME TO postings;

CREATE TABLE comfyfleet_tenants.numbered_runs (
    tenant text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    workflow_hash text NOT NULL,
    service text NOT NULL,
    phase text NOT NULL,
    at double precision NOT NULL,
    worker_id text,
    outputs integer NOT NULL,
    gpu_milliseconds bigint NOT NULL,
    consumed bigint NOT NULL,
    cost_micros bigint,
    verified_by text NOT NULL,
    PRIMARY KEY (tenant, number),
    UNIQUE (job_id, round)
);

INSERT INTO comfyfleet_tenants.numbered_runs
SELECT tenant, row_number() OVER (PARTITION BY tenant ORDER BY number), job_id, round, workflow_hash, service, phase, at,
    worker_id, outputs, gpu_milliseconds, consumed, cost_micros, verified_by
FROM comfyfleet_tenants.runs;

DROP TABLE comfyfleet_tenants.runs;
ALTER TABLE comfyfleet_tenants.numbered_runs RENAME TO runs;
CREATE INDEX runs_by_time ON comfyfleet_tenants.runs (tenant, at);

-- Entries are only ever added, unless their tenant goes.
CREATE FUNCTION comfyfleet_tenants.remain() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'postings' THEN
        PERFORM FROM comfyfleet_tenants.accounts a WHERE a.tenant = OLD.tenant AND a.fence IS NOT NULL;
    ELSE
        PERFORM FROM comfyfleet_tenants.holds h JOIN comfyfleet_tenants.accounts a ON a.tenant = h.tenant
            WHERE h.job_id = OLD.job_id AND h.round = OLD.round AND a.fence IS NOT NULL;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% are only ever added', TG_TABLE_NAME;
    END IF;
    RETURN OLD;
END $$;

DROP TRIGGER stay ON comfyfleet_tenants.settlements;
CREATE TRIGGER stay BEFORE UPDATE OR TRUNCATE ON comfyfleet_tenants.postings
    FOR EACH STATEMENT EXECUTE FUNCTION comfyfleet_tenants.stay();
CREATE TRIGGER stay BEFORE UPDATE OR TRUNCATE ON comfyfleet_tenants.settlements
    FOR EACH STATEMENT EXECUTE FUNCTION comfyfleet_tenants.stay();
CREATE TRIGGER remain BEFORE DELETE ON comfyfleet_tenants.postings
    FOR EACH ROW EXECUTE FUNCTION comfyfleet_tenants.remain();
CREATE TRIGGER remain BEFORE DELETE ON comfyfleet_tenants.settlements
    FOR EACH ROW EXECUTE FUNCTION comfyfleet_tenants.remain();

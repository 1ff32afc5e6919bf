-- One schema for the tenants of a pool. Amounts are whole credits; what always holds is said here too, so that a mistake
-- in the program is refused by the database.

CREATE TABLE comfyfleet_tenants.jobs (
    job_id text COLLATE "C" PRIMARY KEY,
    tenant text NOT NULL,
    reference text,
    round integer NOT NULL,
    phase text NOT NULL,
    record bytea NOT NULL,
    payload bytea NOT NULL,
    result bytea
);

CREATE UNIQUE INDEX jobs_by_reference ON comfyfleet_tenants.jobs (tenant, reference) WHERE reference IS NOT NULL;
CREATE INDEX jobs_by_tenant ON comfyfleet_tenants.jobs (tenant, job_id);
CREATE INDEX jobs_by_phase ON comfyfleet_tenants.jobs (tenant, phase, job_id);

-- outbox: unsent, sent, closed. The envelope is what the central store gets; a closed round needs none.
CREATE TABLE comfyfleet_tenants.rounds (
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    tenant text NOT NULL,
    phase text NOT NULL CHECK (phase IN ('open', 'completed', 'failed', 'cancelled')),
    outbox text NOT NULL CHECK (outbox IN ('unsent', 'sent', 'closed') AND (outbox = 'closed') = (phase <> 'open')),
    envelope bytea,
    opened_at double precision NOT NULL,
    ended_at double precision,
    PRIMARY KEY (job_id, round)
);

CREATE INDEX rounds_to_send ON comfyfleet_tenants.rounds (outbox, job_id, round) WHERE outbox <> 'closed';
CREATE INDEX rounds_by_tenant ON comfyfleet_tenants.rounds (tenant, phase);

-- Copies of the central store's events are known by their ids.
CREATE TABLE comfyfleet_tenants.inbox (event_id text PRIMARY KEY, at double precision NOT NULL);

CREATE INDEX inbox_by_age ON comfyfleet_tenants.inbox (at);

CREATE TABLE comfyfleet_tenants.accounts (
    tenant text PRIMARY KEY,
    balance bigint NOT NULL,
    held bigint NOT NULL CHECK (held >= 0),
    CHECK (balance - held >= 0)
);

CREATE TABLE comfyfleet_tenants.holds (
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    tenant text NOT NULL,
    amount bigint NOT NULL CHECK (amount >= 0),
    at double precision NOT NULL,
    is_settled boolean NOT NULL, -- as the settlements say; here so that the open ones are found at once
    PRIMARY KEY (job_id, round)
);

CREATE INDEX open_holds ON comfyfleet_tenants.holds (at, job_id) WHERE NOT is_settled;
CREATE INDEX holds_by_tenant ON comfyfleet_tenants.holds (tenant);

-- The key is the guard: one for each hold.
CREATE TABLE comfyfleet_tenants.settlements (
    job_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    amount bigint NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('consumed', 'refunded')),
    phase text NOT NULL CHECK ((phase = 'completed') = (outcome = 'consumed')),
    consumed bigint NOT NULL CHECK (consumed BETWEEN 0 AND amount AND (outcome = 'consumed' OR consumed = 0)),
    at double precision NOT NULL,
    note text NOT NULL,
    PRIMARY KEY (job_id, round)
);

CREATE TABLE comfyfleet_tenants.grants (
    tenant text NOT NULL,
    grant_id text COLLATE "C" NOT NULL,
    amount bigint NOT NULL CHECK (amount > 0),
    at double precision NOT NULL,
    state text NOT NULL CHECK (state IN ('pending', 'granted', 'void')),
    note text NOT NULL,
    PRIMARY KEY (tenant, grant_id)
);

CREATE TABLE comfyfleet_tenants.postings (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL,
    kind text NOT NULL,
    balance bigint NOT NULL,
    held bigint NOT NULL,
    at double precision NOT NULL,
    reference text NOT NULL,
    note text NOT NULL,
    UNIQUE (tenant, kind, reference)
);

CREATE INDEX postings_by_tenant ON comfyfleet_tenants.postings (tenant, number);

-- Entries are only ever added.
CREATE FUNCTION comfyfleet_tenants.stay() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION '% are only ever added', TG_TABLE_NAME; END $$;

CREATE TRIGGER stay BEFORE UPDATE OR DELETE OR TRUNCATE ON comfyfleet_tenants.postings
    FOR EACH STATEMENT EXECUTE FUNCTION comfyfleet_tenants.stay();
CREATE TRIGGER stay BEFORE UPDATE OR DELETE OR TRUNCATE ON comfyfleet_tenants.settlements
    FOR EACH STATEMENT EXECUTE FUNCTION comfyfleet_tenants.stay();

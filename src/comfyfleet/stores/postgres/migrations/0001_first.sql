-- The first schema. Ids are compared as bytes (COLLATE "C"), so that every store sorts them alike.
-- Times are seconds since 1970 as float8, the form in which the engine computes with them.
-- Values the store never looks into are kept as `json`: exact text, and readable with SQL.

CREATE TABLE comfyfleet.state (
    is_single boolean PRIMARY KEY DEFAULT true CHECK (is_single),
    table_version bigint NOT NULL DEFAULT 0,
    is_paused boolean NOT NULL DEFAULT false,
    epoch integer NOT NULL DEFAULT 1
);
INSERT INTO comfyfleet.state DEFAULT VALUES;

-- the table profile × class

CREATE TABLE comfyfleet.classes (
    class_key text COLLATE "C" PRIMARY KEY,
    number bigint GENERATED ALWAYS AS IDENTITY,
    body json NOT NULL
);

CREATE TABLE comfyfleet.profiles (
    profile text COLLATE "C" PRIMARY KEY
);

CREATE TABLE comfyfleet.profile_classes (
    profile text COLLATE "C" NOT NULL,
    class_key text COLLATE "C" NOT NULL,
    PRIMARY KEY (profile, class_key)
);
CREATE INDEX profile_classes_by_class ON comfyfleet.profile_classes (class_key);

CREATE TABLE comfyfleet.tenants (
    tenant text COLLATE "C" PRIMARY KEY,
    virtual_time float8 NOT NULL
) WITH (fillfactor = 50);

-- Lanes. `head` is a lower bound of the sequence numbers that wait in the lane. Whoever puts a job into a lane holds
-- the lane's row FOR KEY SHARE to the end of its transaction; whoever raises `head` or removes the lane holds it FOR
-- UPDATE and looks again under that lock. So a bound is never too high, and enqueues do not wait for one another.

CREATE TABLE comfyfleet.lanes (
    lane_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    class_key text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    workflow_hash text COLLATE "C" NOT NULL,
    head bigint NOT NULL,
    UNIQUE (class_key, tenant, priority, workflow_hash)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500);

-- The hot table: open dispatches only, about half a kilobyte each. What has ended moves to `ended`.
-- `lane_id` is set exactly while the dispatch stands in its lane. Pages are filled: a lease, a heartbeat and an end each
-- change a column that is indexed, so room left on a page would save no index entry.

CREATE SEQUENCE comfyfleet.job_sequence;
CREATE SEQUENCE comfyfleet.lease_order;

CREATE TABLE comfyfleet.dispatches (
    job_id text COLLATE "C" PRIMARY KEY,
    sequence bigint NOT NULL,
    lane_id bigint,
    phase text COLLATE "C" NOT NULL,
    due_at float8,
    queued_at float8 NOT NULL,
    class_key text COLLATE "C" NOT NULL,
    relaxed_class text COLLATE "C",
    worker_id text COLLATE "C",
    poll_id text COLLATE "C",
    lease_order bigint,
    fact_count integer NOT NULL,
    job_phase text COLLATE "C" NOT NULL,
    envelope json NOT NULL
) WITH (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX dispatches_in_lanes ON comfyfleet.dispatches (lane_id, sequence) WHERE lane_id IS NOT NULL;
CREATE INDEX dispatches_due ON comfyfleet.dispatches (due_at, job_id) WHERE due_at IS NOT NULL;
CREATE INDEX dispatches_by_worker ON comfyfleet.dispatches (worker_id, lease_order) WHERE worker_id IS NOT NULL;
CREATE INDEX dispatches_by_poll ON comfyfleet.dispatches (poll_id, lease_order) WHERE poll_id IS NOT NULL;
CREATE INDEX dispatches_by_class ON comfyfleet.dispatches (class_key);
CREATE INDEX dispatches_by_relaxed_class ON comfyfleet.dispatches (relaxed_class) WHERE relaxed_class IS NOT NULL;

-- Counters, one row for each of a few backends: exact when added up, and two writers seldom want the same row.

CREATE TABLE comfyfleet.tallies (
    shard integer PRIMARY KEY,
    in_lane bigint NOT NULL DEFAULT 0,
    delayed bigint NOT NULL DEFAULT 0,
    paused bigint NOT NULL DEFAULT 0,
    queued bigint NOT NULL DEFAULT 0,
    leased bigint NOT NULL DEFAULT 0,
    completed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO comfyfleet.tallies (shard) SELECT generate_series(0, 31);

-- history

CREATE TABLE comfyfleet.ended (
    job_id text COLLATE "C" PRIMARY KEY,
    sequence bigint NOT NULL,
    phase text COLLATE "C" NOT NULL,
    ended_at float8 NOT NULL,
    due_at float8,
    fact_count integer NOT NULL,
    job_phase text COLLATE "C" NOT NULL,
    envelope json NOT NULL
);
CREATE INDEX ended_by_time ON comfyfleet.ended (phase, ended_at);
CREATE INDEX ended_by_sequence ON comfyfleet.ended (phase, sequence);
CREATE INDEX ended_failed ON comfyfleet.ended (job_id) WHERE phase = 'failed';
CREATE INDEX ended_due ON comfyfleet.ended (due_at, job_id) WHERE due_at IS NOT NULL;

CREATE TABLE comfyfleet.jobs (
    job_id text COLLATE "C" PRIMARY KEY,
    sequence bigint NOT NULL UNIQUE,
    tenant text COLLATE "C" NOT NULL,
    reference text COLLATE "C",
    record json NOT NULL,
    payload json NOT NULL,
    result json
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX jobs_by_reference ON comfyfleet.jobs (tenant, reference) WHERE reference IS NOT NULL;
CREATE INDEX jobs_by_tenant ON comfyfleet.jobs (tenant, sequence);

CREATE TABLE comfyfleet.facts (
    job_id text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    kind text COLLATE "C" NOT NULL,
    at float8 NOT NULL,
    round integer NOT NULL,
    data json,
    PRIMARY KEY (job_id, number)
);

CREATE TABLE comfyfleet.attempts (
    job_id text COLLATE "C" NOT NULL,
    lease_number integer NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    body json NOT NULL,
    PRIMARY KEY (job_id, lease_number)
) WITH (fillfactor = 80);

-- workers, blocks, lessons

CREATE TABLE comfyfleet.workers (
    worker_id text COLLATE "C" PRIMARY KEY,
    number bigint GENERATED ALWAYS AS IDENTITY,
    body json NOT NULL
) WITH (fillfactor = 50);

CREATE SEQUENCE comfyfleet.block_order;

CREATE TABLE comfyfleet.blocks (
    worker_id text COLLATE "C" NOT NULL,
    target text COLLATE "C" NOT NULL,
    worker_order bigint NOT NULL,
    number bigint NOT NULL,
    blocked_until float8,
    body json NOT NULL,
    PRIMARY KEY (worker_id, target)
);
CREATE INDEX blocks_by_end ON comfyfleet.blocks (blocked_until) WHERE blocked_until IS NOT NULL;

CREATE SEQUENCE comfyfleet.lesson_order;

CREATE TABLE comfyfleet.lessons (
    workflow_hash text COLLATE "C" PRIMARY KEY,
    number bigint NOT NULL,
    body json NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX lessons_by_age ON comfyfleet.lessons (number);

-- small documents beside the queue: keys, enrolments, the audit log

CREATE TABLE comfyfleet.documents (
    drawer text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (drawer, name)
) WITH (fillfactor = 80);

-- One file for the tenants of a pool. Amounts are whole credits; what always holds is said here too, so that a mistake
-- in the program is refused by the file.

CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    reference TEXT,
    round INTEGER NOT NULL,
    phase TEXT NOT NULL,
    record BLOB NOT NULL,
    payload BLOB NOT NULL,
    result BLOB
);

CREATE UNIQUE INDEX jobs_by_reference ON jobs (tenant, reference) WHERE reference IS NOT NULL;
CREATE INDEX jobs_by_tenant ON jobs (tenant, job_id);
CREATE INDEX jobs_by_phase ON jobs (tenant, phase, job_id);

-- outbox: unsent, sent, closed. The envelope is what the central store gets; a closed round needs none.
CREATE TABLE rounds (
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('open', 'completed', 'failed', 'cancelled')),
    outbox TEXT NOT NULL CHECK (outbox IN ('unsent', 'sent', 'closed') AND (outbox = 'closed') = (phase <> 'open')),
    envelope BLOB,
    opened_at REAL NOT NULL,
    ended_at REAL,
    PRIMARY KEY (job_id, round)
) WITHOUT ROWID;

CREATE INDEX rounds_to_send ON rounds (outbox, job_id, round) WHERE outbox <> 'closed';
CREATE INDEX rounds_by_tenant ON rounds (tenant, phase);

-- Copies of the central store's events are known by their ids.
CREATE TABLE inbox (event_id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;

CREATE INDEX inbox_by_age ON inbox (at);

CREATE TABLE accounts (
    tenant TEXT PRIMARY KEY,
    balance INTEGER NOT NULL,
    held INTEGER NOT NULL CHECK (held >= 0),
    CHECK (balance - held >= 0)
) WITHOUT ROWID;

CREATE TABLE holds (
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount >= 0),
    at REAL NOT NULL,
    is_settled BOOLEAN NOT NULL, -- as the settlements say; here so that the open ones are found at once
    PRIMARY KEY (job_id, round)
) WITHOUT ROWID;

CREATE INDEX open_holds ON holds (at, job_id) WHERE NOT is_settled;
CREATE INDEX holds_by_tenant ON holds (tenant);

-- The key is the guard: one for each hold.
CREATE TABLE settlements (
    job_id TEXT NOT NULL,
    round INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('consumed', 'refunded')),
    phase TEXT NOT NULL CHECK ((phase = 'completed') = (outcome = 'consumed')),
    consumed INTEGER NOT NULL CHECK (consumed BETWEEN 0 AND amount AND (outcome = 'consumed' OR consumed = 0)),
    at REAL NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (job_id, round)
) WITHOUT ROWID;

CREATE TABLE grants (
    tenant TEXT NOT NULL,
    grant_id TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount > 0),
    at REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'granted', 'void')),
    note TEXT NOT NULL,
    PRIMARY KEY (tenant, grant_id)
) WITHOUT ROWID;

CREATE TABLE postings (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    balance INTEGER NOT NULL,
    held INTEGER NOT NULL,
    at REAL NOT NULL,
    reference TEXT NOT NULL,
    note TEXT NOT NULL,
    UNIQUE (tenant, kind, reference)
);

CREATE INDEX postings_by_tenant ON postings (tenant, number);

-- Entries are only ever added.
CREATE TRIGGER postings_stay BEFORE UPDATE ON postings BEGIN SELECT raise(ABORT, 'postings are only ever added'); END;
CREATE TRIGGER postings_remain BEFORE DELETE ON postings BEGIN SELECT raise(ABORT, 'postings are only ever added'); END;
CREATE TRIGGER settlements_stay BEFORE UPDATE ON settlements BEGIN SELECT raise(ABORT, 'settlements are final'); END;
CREATE TRIGGER settlements_remain BEFORE DELETE ON settlements BEGIN SELECT raise(ABORT, 'settlements are final'); END;

-- What tenants have had of the fleet beside their virtual time, on which terms, and what each lease was charged with.

INSERT INTO meta VALUES ('is_fair', 0);

ALTER TABLE tenants ADD COLUMN credit REAL NOT NULL DEFAULT 0;

ALTER TABLE tenants ADD COLUMN is_behind INTEGER NOT NULL DEFAULT 0;

CREATE TABLE terms (tenant TEXT PRIMARY KEY, terms BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE charges (job_id TEXT PRIMARY KEY, charge REAL NOT NULL) WITHOUT ROWID;

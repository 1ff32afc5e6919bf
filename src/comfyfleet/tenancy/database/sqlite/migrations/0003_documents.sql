-- Small documents of a tenant, each with a version that its next writer compares: records of files.

CREATE TABLE documents (
    tenant TEXT NOT NULL,
    drawer TEXT NOT NULL,
    name TEXT NOT NULL,
    body BLOB NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (tenant, drawer, name)
) WITHOUT ROWID;

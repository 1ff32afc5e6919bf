-- Small documents of a tenant, each with a version that its next writer compares: records of files.

CREATE TABLE comfyfleet_tenants.documents (
    tenant text COLLATE "C" NOT NULL,
    drawer text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (tenant, drawer, name)
);

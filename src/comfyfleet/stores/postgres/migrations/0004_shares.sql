-- What tenants have had of the fleet beside their virtual time, and on which terms. Nothing is counted or charged until
-- the first tenant gets terms (`is_fair`); from then on whoever leases, or ends a lease, holds an advisory lock: caps and
-- charges are exact, and leases go one after the other.

ALTER TABLE comfyfleet.state ADD COLUMN is_fair boolean NOT NULL DEFAULT false;

ALTER TABLE comfyfleet.tenants
    ADD COLUMN credit float8 NOT NULL DEFAULT 0,
    ADD COLUMN leased integer NOT NULL DEFAULT 0,
    ADD COLUMN is_behind boolean NOT NULL DEFAULT false,
    ADD COLUMN has_terms boolean NOT NULL DEFAULT false,
    ADD COLUMN weight float8 NOT NULL DEFAULT 1,
    ADD COLUMN max_leased integer,
    ADD COLUMN held_until float8;

-- The virtual time that the lease on it was charged with.
ALTER TABLE comfyfleet.dispatches ADD COLUMN charge float8;

CREATE INDEX lanes_by_tenant ON comfyfleet.lanes (tenant);

-- Ends of jobs whose records lie in a tenant's database: which are still to be settled there is found by an index of its
-- own, and what may be purged without a look at those.

ALTER TABLE comfyfleet.ended ADD COLUMN is_apart boolean NOT NULL DEFAULT false;
ALTER TABLE comfyfleet.ended ADD COLUMN is_unsettled boolean NOT NULL DEFAULT false;
CREATE INDEX ended_unsettled ON comfyfleet.ended (job_id) WHERE is_unsettled;
DROP INDEX comfyfleet.ended_by_time;
CREATE INDEX ended_by_time ON comfyfleet.ended (phase, is_apart, ended_at) WHERE NOT is_unsettled;

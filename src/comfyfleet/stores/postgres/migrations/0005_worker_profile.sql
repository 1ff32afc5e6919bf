-- The profile of a worker beside its record, which may be large: every lease asks whether it is still the one that was
-- matched.

ALTER TABLE comfyfleet.workers ADD COLUMN profile text COLLATE "C" GENERATED ALWAYS AS (body ->> 'profile') STORED;

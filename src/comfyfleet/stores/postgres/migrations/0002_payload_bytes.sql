-- What the payloads of open jobs take. Jobs that were submitted before do not say, and count nothing.

ALTER TABLE comfyfleet.tallies ADD COLUMN payload_bytes bigint NOT NULL DEFAULT 0;

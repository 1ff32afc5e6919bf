-- When the newest round of a job ended, so that old jobs are found without looking at all others. Rounds stay.

ALTER TABLE jobs ADD COLUMN ended_at REAL;
UPDATE jobs SET ended_at = (
    SELECT r.ended_at FROM rounds r WHERE r.job_id = jobs.job_id AND r.round = jobs.round
);

CREATE INDEX jobs_by_end ON jobs (phase, ended_at) WHERE ended_at IS NOT NULL;

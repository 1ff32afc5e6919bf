-- Of a job whose record lies in a tenant's database: its id until its end is settled there, '' from then on. NULL of all
-- others. What may be purged is found in the order it ended without a look at what must stay.

ALTER TABLE ended_jobs ADD COLUMN apart TEXT;

DROP INDEX ended_jobs_by_ending;

CREATE INDEX ended_jobs_by_ending ON ended_jobs (phase, apart, ending);

CREATE INDEX ended_jobs_unsettled ON ended_jobs (apart) WHERE apart > '';

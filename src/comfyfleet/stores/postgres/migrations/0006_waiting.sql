-- How many jobs wait in each lane and at each priority. Like the tallies, each count is the sum of a few rows, one for each of
-- a few backends: exact when added up, and two writers seldom want the same row. Shard -1 takes up what others had.

LOCK TABLE comfyfleet.dispatches IN EXCLUSIVE MODE;

CREATE TABLE comfyfleet.lane_tallies (
    lane_id bigint NOT NULL,
    shard integer NOT NULL,
    waiting bigint NOT NULL,
    PRIMARY KEY (lane_id, shard)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
INSERT INTO comfyfleet.lane_tallies (lane_id, shard, waiting)
SELECT lane_id, -1, count(*) FROM comfyfleet.dispatches WHERE lane_id IS NOT NULL GROUP BY lane_id;

CREATE TABLE comfyfleet.priority_tallies (
    priority integer NOT NULL,
    shard integer NOT NULL,
    waiting bigint NOT NULL,
    PRIMARY KEY (priority, shard)
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
INSERT INTO comfyfleet.priority_tallies (priority, shard, waiting)
SELECT l.priority, -1, count(*) FROM comfyfleet.dispatches d JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
GROUP BY l.priority;

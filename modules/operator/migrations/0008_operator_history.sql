-- Figures of each part, in steps of 10 s for an hour and of 300 s for a day. The first three numbers are sums over all processes.
-- problems is the largest number that a process has found. The others are null until a process has measured them.
CREATE TABLE IF NOT EXISTS holdfast_history (
    step     integer          NOT NULL,
    at       timestamptz      NOT NULL,
    part     text             NOT NULL,
    done     bigint           NOT NULL,
    failed   bigint           NOT NULL,
    retried  bigint           NOT NULL,
    problems integer          NOT NULL,
    waiting  integer,
    retrying integer,
    dead     integer,
    lag      double precision,
    PRIMARY KEY (step, at, part)
) WITH (fillfactor = 50);

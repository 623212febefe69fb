-- Figures of each part, in steps of 10 s for an hour and of 300 s for a day. The first three numbers are sums over all processes.
-- problems is the largest number that a process has found. The others are null until a process has measured them. asked is true
-- if a process has tried that.
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
    asked    boolean          NOT NULL,
    PRIMARY KEY (step, at, part)
) WITH (fillfactor = 50);

-- One row for each process that records. It is deleted a day after its last report. beat is the
-- number of that report: a report that arrives twice changes neither table. slowest has the oldest ten messages in work.
CREATE TABLE IF NOT EXISTS holdfast_process (
    id      uuid        PRIMARY KEY,
    beat    bigint      NOT NULL,
    host    text        NOT NULL,
    pid     integer     NOT NULL,
    version text        NOT NULL,
    roles   text[]      NOT NULL,
    since   timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    in_work integer     NOT NULL,
    slowest jsonb       NOT NULL
) WITH (fillfactor = 50);

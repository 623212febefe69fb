-- What operators did: a row is there before anything is changed, and how many were changed is known
-- afterwards. null: the command did not come to its end.
CREATE TABLE IF NOT EXISTS holdfast_operator_log (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    what    text        NOT NULL,
    part    text        NOT NULL,
    chosen  text        NOT NULL,
    actor   text        NOT NULL,
    reason  text        NOT NULL,
    count   integer,
    failure text        NOT NULL DEFAULT ''
);

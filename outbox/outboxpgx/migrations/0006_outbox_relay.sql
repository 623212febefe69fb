-- The transactions of relays as functions, so that a message costs few statements. At READ COMMITTED a function takes a new
-- snapshot for each of its statements: a statement after a lock sees everything that was committed before the lock was
-- granted.
--
-- Each function first sets parameters until the end of the transaction. The table is often empty when it is analysed and
-- full a moment later, so plans must not depend on statistics. They must be generic, too: planning takes longer than
-- the statement. The timeout releases the locks of a relay on a dead host, long before TCP notices.

-- Leases free lanes that have a ready row. The lane with the oldest lease comes first. A lane without a token is free at any
-- lease_until: the clock may have been set back. Nothing is leased during a pause. A lane is skipped while another session
-- has locked its first ready row, because the row could not be settled. Only a row that was locked before has an xmax, so
-- few locks are tested. Locked due rows do not count either. Rows that are not due are not tested, because the test locks them
-- until the claim has ended: an operator's change would leave them out.
--
-- It commits without waiting for the disk. If a crash of the database undoes a claim, the settlement finds that the token
-- is missing.
--
-- A lane is doubtful if its last claim was lost, or if messages of that claim are still suspect. A doubtful lane is leased
-- alone, to a relay without another batch in flight. Each lost claim makes the batches of its lane eight times smaller,
-- until the last possible row of the claim is settled.
--
-- Parameters: the new token, the microseconds of the lease, the most lanes, the transports to skip, the most messages,
-- whether the relay has no other batch in flight, and the tokens of claims without an answer to COMMIT: their leases end.
-- The last row has no lane. It reports whether doubtful lanes were left, and the microseconds until the first waiting row is
-- due and until the first lease of another claim ends, at most a year. NULL: there is none. It also has the number of lanes
-- whose lease the table ignored.
--
-- The era of a lane includes the start time of the server: a standby that was promoted may have lost sequence numbers, and
-- uses them again. A relay may see no error from a failover, because a pool replaces idle connections silently.
CREATE FUNCTION {{claim}}(
    claim_token bigint, lease_us bigint, most_lanes integer, skip text[], most integer, by_itself boolean, lost_tokens bigint[]
) RETURNS TABLE (lane smallint, single boolean, doubtful boolean, era bigint, due_us bigint, ends_us bigint, dropped bigint) LANGUAGE plpgsql AS $claim$
#variable_conflict use_column
DECLARE
    server_start bigint := extract(epoch FROM pg_postmaster_start_time()) * 1000000;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
        set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
        set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true), set_config('synchronous_commit', 'off', true);
    IF lost_tokens <> '{}' THEN
        WITH mine AS MATERIALIZED (SELECT l.lane FROM {{lanes}} l WHERE l.token = ANY(lost_tokens) ORDER BY l.lane FOR UPDATE SKIP LOCKED)
        UPDATE {{lanes}} l SET token = NULL FROM mine WHERE l.lane = mine.lane;
    END IF;
    RETURN QUERY
    WITH able AS MATERIALIZED (
        SELECT l.lane, l.lease_until, l.token IS NOT NULL OR l.suspect IS NOT NULL AS doubtful FROM {{lanes}} l
        WHERE (l.token IS NULL OR l.lease_until <= now()) AND NOT EXISTS (SELECT FROM {{pause}} p)
            AND (SELECT CASE WHEN o.xmax = 0 THEN true ELSE (SELECT true FROM {{table}} x WHERE x.id = o.id FOR UPDATE SKIP LOCKED) END
                 FROM {{table}} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL
                 AND o.transport_name <> ALL(skip) ORDER BY o.seq LIMIT 1)),
    kind AS MATERIALIZED (SELECT a.doubtful FROM able a WHERE by_itself OR NOT a.doubtful ORDER BY a.lease_until LIMIT 1),
    free AS MATERIALIZED (
        SELECT l.lane FROM {{lanes}} l JOIN able a ON l.lane = a.lane
        WHERE (l.token IS NULL OR l.lease_until <= now()) AND a.doubtful = (SELECT k.doubtful FROM kind k)
        ORDER BY a.lease_until LIMIT (SELECT CASE WHEN k.doubtful THEN 1 ELSE most_lanes END FROM kind k) FOR UPDATE OF l SKIP LOCKED),
    leased AS (
        UPDATE {{lanes}} l SET token = claim_token, lease_until = now() + lease_us * interval '1 microsecond',
            batch = CASE WHEN l.token IS NOT NULL THEN greatest(1, l.batch / 8) WHEN l.suspect IS NOT NULL THEN l.batch ELSE most END,
            losses = CASE WHEN l.token IS NOT NULL AND l.batch = 1 THEN l.losses + 1 ELSE l.losses END,
            suspect = CASE WHEN l.token IS NULL THEN l.suspect ELSE (
                SELECT max(h.seq) FROM (
                    SELECT o.seq FROM {{table}} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL
                        AND o.transport_name <> ALL(skip) ORDER BY o.seq LIMIT l.batch) h) END
        FROM free f WHERE l.lane = f.lane
        RETURNING l.lane, l.suspect IS NOT NULL AND l.batch = 1 AS single, l.era + server_start AS era)
    SELECT l.lane, l.single, (SELECT k.doubtful FROM kind k), l.era, NULL::bigint, NULL::bigint, 0::bigint FROM leased l
    UNION ALL
    SELECT NULL, false, EXISTS (SELECT FROM able a WHERE a.doubtful) AND NOT coalesce((SELECT k.doubtful FROM kind k), false), 0,
        (SELECT CASE WHEN o.due_at > now() THEN ceil(extract(epoch FROM least(o.due_at, now() + interval '1 year') - now()) * 1000000)::bigint ELSE 0 END
         FROM {{table}} o WHERE o.published_at IS NULL AND o.due_at IS NOT NULL
             AND CASE WHEN o.xmax = 0 OR o.due_at > now() THEN true ELSE (SELECT true FROM {{table}} x WHERE x.id = o.id FOR UPDATE SKIP LOCKED) END
         ORDER BY o.due_at LIMIT 1),
        (SELECT ceil(extract(epoch FROM min(least(l.lease_until, now() + interval '1 year')) - now()) * 1000000)::bigint
         FROM {{lanes}} l WHERE l.token IS NOT NULL AND l.lease_until > now()),
        (SELECT count(*) FROM free) - (SELECT count(*) FROM leased);
END
$claim$;

-- Records outcomes of messages in lanes that the caller has locked. Published messages are deleted, or marked and kept
-- until they are pruned. Failed ones count an attempt and wait. Dead ones move to the dead letters. If a dead letter with the
-- same id exists, because the message was written again after it was given up, the newer one replaces it.
--
-- If the table ignores the deletion of a message without an error, as with a trigger that returns NULL, the message is marked
-- as published. It returns the number of these messages, and the messages that are still ready because their outcome could
-- not be recorded. An id that is not in the table is neither: somebody has removed the message. If the dead letters ignore
-- a message, the call fails.
CREATE FUNCTION {{record}}(
    ours smallint[], published uuid[], keep boolean,
    failed uuid[], delays_us bigint[], failed_classes text[], failed_errors text[],
    dead uuid[], dead_classes text[], dead_errors text[],
    OUT marked bigint, OUT ignored uuid[]
) LANGUAGE plpgsql AS $record$
#variable_conflict use_column
DECLARE
    n bigint := 0;
    m bigint;
BEGIN
    marked := 0;
    ignored := '{}';
    IF published <> '{}' AND NOT keep THEN
        DELETE FROM {{table}} o WHERE o.id = ANY(published) AND o.lane = ANY(ours);
        GET DIAGNOSTICS n = ROW_COUNT;
    END IF;
    IF n < cardinality(published) THEN
        WITH put AS (
            UPDATE {{table}} o SET published_at = now() WHERE o.id = ANY(published) AND o.lane = ANY(ours) AND o.published_at IS NULL
            RETURNING o.published_at)
        SELECT count(p.published_at) INTO m FROM put p;
        IF NOT keep THEN
            marked := m;
        END IF;
        IF n + m < cardinality(published) THEN
            ignored := ARRAY(SELECT o.id FROM {{table}} o WHERE o.id = ANY(published) AND o.lane = ANY(ours) AND o.published_at IS NULL);
        END IF;
    END IF;
    IF failed <> '{}' THEN
        WITH put AS (
            UPDATE {{table}} o SET attempts = least(o.attempts, 2147483646) + 1, held = false, due_at = now() + f.delay * interval '1 microsecond',
                error_class = f.class, last_error = f.error
            FROM unnest(failed, delays_us, failed_classes, failed_errors) AS f(id, delay, class, error)
            WHERE o.id = ANY (ARRAY[f.id]) AND o.lane = ANY(ours) -- by index, whatever the statistics say: see waiting.go
            RETURNING o.due_at)
        SELECT count(p.due_at) INTO n FROM put p;
        IF n < cardinality(failed) THEN
            ignored := ignored || ARRAY(SELECT o.id FROM {{table}} o WHERE o.id = ANY(failed) AND o.lane = ANY(ours) AND o.published_at IS NULL AND o.due_at IS NULL);
        END IF;
    END IF;
    IF dead <> '{}' THEN
        WITH gone AS (DELETE FROM {{table}} o WHERE o.id = ANY(dead) AND o.lane = ANY(ours) RETURNING o.*),
        buried AS (
            INSERT INTO {{dead}} AS d (id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
                seq, created_at, attempts, error_class, last_error)
            SELECT g.id, g.lane, g.name, g.body, g.content_type, g.headers, g.ordering_key, g.transport_name, g.exchange, g.routing_key, g.route_headers,
                g.seq, g.created_at, least(g.attempts, 2147483646) + 1, f.class, f.error
            FROM gone g JOIN unnest(dead, dead_classes, dead_errors) AS f(id, class, error) ON f.id = g.id
            ORDER BY g.seq
            ON CONFLICT (id) DO UPDATE SET (
                lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers,
                seq, created_at, attempts, error_class, last_error, died_at) = (
                EXCLUDED.lane, EXCLUDED.name, EXCLUDED.body, EXCLUDED.content_type, EXCLUDED.headers, EXCLUDED.ordering_key, EXCLUDED.transport_name,
                EXCLUDED.exchange, EXCLUDED.routing_key, EXCLUDED.route_headers, EXCLUDED.seq, EXCLUDED.created_at, EXCLUDED.attempts,
                EXCLUDED.error_class, EXCLUDED.last_error, EXCLUDED.died_at)
            RETURNING 1)
        SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM buried) INTO n, m;
        IF m < n THEN
            PERFORM {{ignored}}('{{raw.dead}}', n - m);
        END IF;
        IF n < cardinality(dead) THEN
            ignored := ignored || ARRAY(SELECT o.id FROM {{table}} o WHERE o.id = ANY(dead) AND o.lane = ANY(ours) AND o.published_at IS NULL);
        END IF;
    END IF;
END
$record$;

-- Settles a batch, and returns the lanes that still have its token. It changes no message of another lane, so a batch is
-- settled once.
--
-- Outcomes are recorded together. If that fails, the caller calls it again with singly: one failed outcome does not prevent
-- the others. It also returns the number of messages that were marked instead of deleted, the ids whose outcome could not be
-- recorded, the reasons if they are errors, and the number of lanes whose release the table ignored.
--
-- Each floor rises to the first ready row, but not above the horizon, and only in the era of the horizon, which includes the
-- start time of the server. A lane is no longer suspect when its floor is past the suspect row, and its losses count from 0.
--
-- It waits 1 s at most for a message that another session has locked: that session may stay open forever.
CREATE FUNCTION {{settle}}(
    lanes smallint[], tokens bigint[], published uuid[], keep boolean,
    failed uuid[], delays_us bigint[], failed_classes text[], failed_errors text[],
    dead uuid[], dead_classes text[], dead_errors text[], horizon bigint, horizon_era bigint, singly boolean,
    OUT ours smallint[], OUT marked bigint, OUT refused uuid[], OUT reasons text[], OUT dropped bigint
) LANGUAGE plpgsql AS $settle$
#variable_conflict use_column
DECLARE
    server_start bigint := extract(epoch FROM pg_postmaster_start_time()) * 1000000;
    one record;
    nth_failed integer;
    nth_dead integer;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
        set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
        set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true);
    marked := 0;
    refused := '{}';
    reasons := '{}';
    dropped := 0;
    ours := ARRAY(
        SELECT l.lane FROM {{lanes}} l JOIN unnest(lanes, tokens) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token
        ORDER BY l.lane FOR UPDATE OF l);
    IF ours = '{}' THEN
        RETURN;
    END IF;
    IF NOT singly THEN
        PERFORM set_config('lock_timeout', '1s', true);
        SELECT r.marked, r.ignored INTO marked, refused
        FROM {{record}}(ours, published, keep, failed, delays_us, failed_classes, failed_errors, dead, dead_classes, dead_errors) AS r;
    ELSE
        PERFORM set_config('lock_timeout', '100ms', true);
        SET CONSTRAINTS ALL IMMEDIATE; -- a deferred one would fail at COMMIT, for all
        FOR n IN 1 .. cardinality(published) + cardinality(failed) + cardinality(dead) LOOP
            nth_failed := n - cardinality(published);
            nth_dead := nth_failed - cardinality(failed);
            BEGIN -- a slice beyond the end of an array is empty
                SELECT r.marked, r.ignored INTO one
                FROM {{record}}(ours, published[n:n], keep, failed[nth_failed:nth_failed], delays_us[nth_failed:nth_failed],
                    failed_classes[nth_failed:nth_failed], failed_errors[nth_failed:nth_failed],
                    dead[nth_dead:nth_dead], dead_classes[nth_dead:nth_dead], dead_errors[nth_dead:nth_dead]) AS r;
                marked := marked + one.marked;
                refused := refused || one.ignored;
                reasons := reasons || array_fill(''::text, ARRAY[cardinality(one.ignored)]);
            EXCEPTION WHEN OTHERS OR assert_failure THEN -- OTHERS has no failed assertions
                refused := refused || published[n:n] || failed[nth_failed:nth_failed] || dead[nth_dead:nth_dead];
                reasons := reasons || format('%s (SQLSTATE %s)', left(SQLERRM, 500), SQLSTATE);
            END;
        END LOOP;
    END IF;
    UPDATE {{lanes}} l SET token = NULL, lease_until = now(), losses = 0,
        floor = CASE WHEN l.era + server_start = horizon_era THEN greatest(l.floor, least(horizon, f.seq)) ELSE l.floor END,
        suspect = CASE WHEN f.seq <= l.suspect THEN l.suspect END
    FROM (SELECT h.lane, (SELECT o.seq FROM {{table}} o WHERE o.lane = h.lane AND o.seq >= h.floor AND o.published_at IS NULL AND o.due_at IS NULL
                          ORDER BY o.seq LIMIT 1) AS seq
          FROM {{lanes}} h WHERE h.lane = ANY(ours)) f
    WHERE l.lane = f.lane;
    GET DIAGNOSTICS dropped = ROW_COUNT;
    dropped := cardinality(ours) - dropped;
END
$settle$;

-- Reports whether a row of the lanes is ready. A relay calls it in the transaction after their release: a relay that was
-- woken for such a row earlier may have found the lane leased.
CREATE FUNCTION {{look}}(released smallint[]) RETURNS boolean LANGUAGE plpgsql AS $look$
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
        set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true);
    RETURN EXISTS (
        SELECT FROM {{lanes}} l WHERE l.lane = ANY(released)
            AND (SELECT true FROM {{table}} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL
                 ORDER BY o.seq LIMIT 1));
END
$look$;

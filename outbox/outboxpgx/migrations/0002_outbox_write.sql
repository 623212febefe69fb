-- Writes a message as part of the caller's transaction, for programs in any language, and returns its id. It
-- refuses what the Go writer refuses: with SQLSTATE 22023 and all that is wrong in one text, but a body that
-- is no JSON with 22P02, one that nests deeper than the server parses with 54001, and one that is not UTF-8 with 22021. The body is a text, or bytes in body_bytes.
-- Without a relay that is told, the message is found when one polls.
CREATE FUNCTION {{write}}(
    name           text,
    body           text        DEFAULT NULL,
    key            text        DEFAULT NULL,
    headers        jsonb       DEFAULT NULL,
    content_type   text        DEFAULT NULL,
    transport      text        DEFAULT NULL,
    exchange       text        DEFAULT NULL,
    routing_key    text        DEFAULT NULL,
    route_headers  jsonb       DEFAULT NULL,
    not_before     timestamptz DEFAULT NULL,
    id             uuid        DEFAULT NULL,
    body_bytes     bytea       DEFAULT NULL,
    max_body_bytes integer     DEFAULT 1048576
) RETURNS uuid LANGUAGE plpgsql AS $write$
DECLARE
    -- 48 bits of milliseconds, and the version in place of that of a random one
    message_id uuid := coalesce(id, encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid);
    sent       bytea   := coalesce(body_bytes, convert_to(body, 'UTF8'));
    media_type text    := coalesce(nullif(content_type, ''), 'application/json');
    media      text    := lower(btrim(split_part(media_type, ';', 1), E' \t'));
    is_json    boolean := media = 'application/json' OR right(media, 5) = '+json';
    most       integer := least(coalesce(nullif(greatest(max_body_bytes, 0), 0), 1048576), 16777216); -- publishers take no more
    problems   text[]  := '{}';
    control    CONSTANT text := '[\u0001-\u001F\u007F-\u009F]'; -- of Unicode; a text of Postgres has no NUL
    field      text;
    given      jsonb;
    header     record;
    total      integer;
    hashed     bytea;
    hash       bigint  := 2166136261; -- FNV-1a of 32 bits, as all writers choose the lane
BEGIN
    IF get_byte(uuid_send(message_id), 6) >> 4 <> 7 OR get_byte(uuid_send(message_id), 8) >> 6 <> 2 THEN
        problems := problems || 'ID is not a UUID of version 7'::text;
    END IF;
    IF name IS NULL OR octet_length(name) > 128 OR name COLLATE "C" !~ '^[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*$' THEN
        problems := problems || 'Name wants lower-case words joined by dots, at most 128 bytes'::text;
    END IF;
    IF (body IS NULL) = (body_bytes IS NULL) THEN
        problems := problems || 'Body wants either body or body_bytes'::text;
    ELSIF octet_length(sent) > most THEN
        problems := problems || format('Body has %s bytes, at most %s are allowed', octet_length(sent), most);
    END IF;
    IF octet_length(media_type) > 127 OR media_type COLLATE "C" !~
        '^[ \t]*[!#$%&''*+.^_`|~0-9A-Za-z-]+/[!#$%&''*+.^_`|~0-9A-Za-z-]+[ ]*(;[ ]*[!#$%&''+.^_`|~0-9A-Za-z-]+=([!#$%&''*+.^_`|~0-9A-Za-z-]+|"[ !#-\[\]-~]*")[ ]*)*;?[ ]*$'
        OR (SELECT count(*) <> count(DISTINCT lower(p[1])) FROM regexp_matches(media_type, ';[ ]*([^=; ]+)=', 'g') AS p) THEN
        problems := problems || 'ContentType is not a media type of at most 127 bytes'::text;
    END IF;
    IF octet_length(key) > 255 OR key COLLATE "C" ~ control THEN
        problems := problems || 'Key wants at most 255 bytes without control characters'::text;
    END IF;
    IF octet_length(transport) > 64 OR transport COLLATE "C" !~ '^[ -~]*$' THEN
        problems := problems || 'Transport wants at most 64 printable ASCII characters'::text;
    END IF;
    IF octet_length(exchange) > 127 OR exchange COLLATE "C" ~ control THEN
        problems := problems || 'Route.Exchange wants at most 127 bytes without control characters'::text;
    END IF;
    IF octet_length(routing_key) > 255 OR routing_key COLLATE "C" ~ control THEN
        problems := problems || 'Route.RoutingKey wants at most 255 bytes without control characters'::text;
    END IF;
    IF NOT isfinite(not_before) OR extract(year FROM not_before AT TIME ZONE 'UTC') NOT BETWEEN 1 AND 9999 THEN
        problems := problems || 'NotBefore is not in the years 1 to 9999'::text;
    END IF;
    FOR field, given IN VALUES ('Headers', headers), ('Route.Headers', route_headers) LOOP
        CONTINUE WHEN given IS NULL OR given IN ('{}', '[]', 'null'); -- PHP's empty array is a list
        IF jsonb_typeof(given) <> 'object' THEN
            problems := problems || (field || ' is not a JSON object of strings');
            CONTINUE;
        END IF;
        IF (SELECT count(*) FROM jsonb_object_keys(given)) > 64 THEN
            problems := problems || (field || ' has more than 64 entries');
            CONTINUE;
        END IF;
        total := 0;
        FOR header IN SELECT e.key AS named, e.value #>> '{}' AS is, jsonb_typeof(e.value) = 'string' AS text FROM jsonb_each(given) AS e LOOP
            total := total + octet_length(header.named) + octet_length(coalesce(header.is, ''));
            IF octet_length(header.named) > 128 OR header.named COLLATE "C" !~ '^[!-~]+$' THEN
                problems := problems || (field || ' has a name that is not 1 to 128 printable ASCII characters');
            ELSIF header.named COLLATE "C" ~* ('^(type|cc|bcc|holdfast-.*|x-death|x-(first|last)-death-(exchange|queue|reason)|x-(delivery|acquired)-count|'
                || 'x-opt-(deaths|delivery-time|mqtt-client-id|rabbitmq-received-time|rabbitmq-sent-time))$') THEN
                problems := problems || format('%s has the name %I, which is reserved', field, header.named);
            ELSIF NOT header.text OR header.is COLLATE "C" ~ control THEN
                problems := problems || format('%s has a value for %I that is not a string without control characters', field, header.named);
            END IF;
        END LOOP;
        IF total > 16384 THEN
            problems := problems || format('%s has %s bytes, at most 16384 are allowed', field, total);
        END IF;
    END LOOP;
    IF problems <> '{}' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'outbox: ' || array_to_string(problems, '; ');
    END IF;
    IF is_json THEN
        PERFORM coalesce(body, convert_from(body_bytes, 'UTF8'))::json;
    END IF;

    hashed := CASE WHEN key <> '' THEN convert_to(key, 'UTF8') ELSE uuid_send(message_id) END;
    FOR n IN 0 .. octet_length(hashed) - 1 LOOP
        hash := ((hash # get_byte(hashed, n)) * 16777619) & 4294967295;
    END LOOP;
    INSERT INTO {{table}} (id, lane, name, body, content_type, headers, ordering_key, transport_name, exchange, routing_key, route_headers, due_at)
    VALUES (message_id, (hash # (hash >> 16)) % 16, name, sent, media_type, CASE WHEN headers NOT IN ('{}', '[]', 'null') THEN headers END, nullif(key, ''),
        coalesce(transport, ''), coalesce(exchange, ''), coalesce(routing_key, ''),
        CASE WHEN route_headers NOT IN ('{}', '[]', 'null') THEN route_headers END, CASE WHEN not_before > now() THEN not_before END);
    IF NOT FOUND THEN
        PERFORM {{ignored}}('{{raw.table}}', 1);
    END IF;
    RETURN message_id;
END
$write$;

-- The names in the function are those of here, whatever the caller's search_path: a temporary table of the name
-- would swallow the message.
DO $pin$
BEGIN
    EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, %s, pg_temp', '{{write}}'::regproc,
        (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = '{{table}}'::regclass));
END
$pin$;

package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
)

const component = "inboxpgx"

// checkTimeout bounds the queries of one Check.
const checkTimeout = 10 * time.Second

// pruneGrace is how much older than the retention an entry may get before Check reports it.
const pruneGrace = 24 * time.Hour

// Check reports everything missing or misconfigured: tables, the key, and the right to insert; triggers,
// rules and policies that may drop writes of the Store; entries that should have been pruned long ago;
// ordering keys stopped for more than 24 hours; parked messages although no consumer on this Store has
// ParkKeys; and names in Config.ByName without a handler. It returns nil if all is well, otherwise the
// findings, or an error if it could not check, within 20 seconds.
func (s *Store) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	for _, name := range s.unhandled() {
		found.Add("correct the name, or register the handler", "Config.ByName names %q, which has no handler", name)
	}
	if s.table != nil {
		found.Join(s.checkTables(ctx))
	}
	return found.Err()
}

func (s *Store) checkTables(ctx context.Context) error {
	var found check.Findings
	err := pgcall.Twice(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		found = check.Findings{Component: component}
		if err := pgcheck.Settings(ctx, conn, &found); err != nil {
			return err
		}
		return s.look(ctx, conn, &found)
	})
	if err != nil {
		found.Join(fmt.Errorf("inboxpgx: check: %w", err))
	}
	return found.Err()
}

func (s *Store) look(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	names := s.table.names
	var unique, insertable bool
	err := conn.QueryRow(ctx, `SELECT has_any_column_privilege(to_regclass($1), 'INSERT'), EXISTS (
		SELECT FROM pg_index i WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 2
		AND ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = i.indrelid AND attnum = ANY(i.indkey) ORDER BY 1) = '{consumer,message_id}')
		WHERE to_regclass($1) IS NOT NULL`, names.entries).Scan(&insertable, &unique)
	if errors.Is(err, pgx.ErrNoRows) {
		found.Add("call Store.Migrate", "table %s does not exist", names.bare)
		return nil
	}
	if err != nil {
		return err
	}
	if !unique {
		found.Add("ALTER TABLE "+names.entries+" ADD PRIMARY KEY (consumer, message_id)",
			"table %s has no unique index on (consumer, message_id): duplicates are not recognised", names.bare)
	}
	if !insertable {
		found.Add("GRANT INSERT ON "+names.entries+" TO the consumer's role", "no right to insert into table %s", names.bare)
	}
	var noLedger, noPause, noParked bool
	if err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NULL, to_regclass($2) IS NULL, to_regclass($3) IS NULL OR to_regclass($4) IS NULL`,
		names.attempts, names.pause, names.stopped, names.waiting).Scan(&noLedger, &noPause, &noParked); err != nil {
		return err
	}
	if err := pgcheck.Drops(ctx, conn, found, names.entries, names.attempts, names.stopped, names.waiting, names.pause); err != nil {
		return err
	}
	if noLedger {
		found.Add("call Store.Migrate", "table %s of the ledger does not exist", names.bare+attemptsSuffix)
	}
	if noPause {
		found.Add("call Store.Migrate", "table %s of paused consumers does not exist", names.bare+pauseSuffix)
	}
	if noParked {
		found.Add("call Store.Migrate", "table %s or %s of stopped ordering keys does not exist", names.bare+stoppedSuffix, names.bare+waitingSuffix)
		return s.lookForUnpruned(ctx, conn, found, "")
	}
	if err := s.lookForParked(ctx, conn, found); err != nil {
		return err
	}
	return s.lookForUnpruned(ctx, conn, found, andNotParked(names, "old"))
}

// lookForUnpruned finds consumers, this one or others, whose entries are not pruned.
func (s *Store) lookForUnpruned(ctx context.Context, conn *pgxpool.Conn, found *check.Findings, unless string) error {
	name := s.table.names.entries
	// One step of the index per consumer, however many entries each has.
	rows, err := conn.Query(ctx, `WITH RECURSIVE every AS (
			(SELECT consumer FROM `+name+` ORDER BY consumer LIMIT 1)
			UNION ALL SELECT (SELECT consumer FROM `+name+` WHERE consumer > every.consumer ORDER BY consumer LIMIT 1) FROM every WHERE consumer IS NOT NULL)
		SELECT consumer FROM every WHERE EXISTS (
			SELECT FROM `+name+` old WHERE old.consumer = every.consumer AND processed_at < now() - $1::interval`+unless+`) LIMIT 20`, later(s.cfg.Retention, pruneGrace))
	if err != nil {
		return err
	}
	consumers, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if answer, ok := errors.AsType[*pgconn.PgError](err); ok && answer.Code == "42501" {
		return nil // this role may only insert; another one prunes
	}
	if err != nil {
		return err
	}
	for _, consumer := range consumers {
		found.Add("run the consumer without a negative PruneInterval, or call Store.Prune; if the consumer is gone for good, DELETE FROM "+name+" WHERE consumer = "+quoted(consumer),
			"entries of consumer %q are more than a day older than the retention of %v", consumer, s.cfg.Retention)
	}
	return nil
}

const (
	// stoppedGrace is how long an ordering key may be stopped before Check reports it.
	stoppedGrace = 24 * time.Hour

	// keyShown is the number of characters of a key in a finding.
	keyShown = 64

	// mostCounted bounds the counts in a finding.
	mostCounted = 100_000
)

// lookForParked finds ordering keys that were stopped long ago, of this consumer and of others, and messages
// that no consumer of this Store will process.
func (s *Store) lookForParked(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	err := s.lookForStopped(ctx, conn, found)
	if err == nil && s.parks.not.Load() && s.parks.cfg.Load() == nil {
		err = s.lookForLeft(ctx, conn, found)
	}
	if answer, ok := errors.AsType[*pgconn.PgError](err); ok && answer.Code == "42501" {
		return nil // this role does not park
	}
	return err
}

func (s *Store) lookForStopped(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	rows, err := conn.Query(ctx, `SELECT DISTINCT ON (consumer) consumer, left(key, $2), extract(epoch FROM now() - since)::bigint, count(*) OVER (PARTITION BY consumer)
		FROM `+s.table.names.stopped+` WHERE next_at = 'infinity' AND since < now() - $1::interval ORDER BY consumer, since LIMIT 20`, stoppedGrace, keyShown)
	if err != nil {
		return err
	}
	var consumer, key string
	var seconds, keys int64
	_, err = pgx.ForEachRow(rows, []any{&consumer, &key, &seconds, &keys}, func() error {
		found.Add("replay or remove their dead letters by DeadLetters of a consumer with ParkKeys; if the consumer is gone for good, "+s.deleteParked(consumer),
			"%d ordering keys of consumer %q have been stopped for more than %v; the longest is %q, for %v",
			keys, consumer, stoppedGrace, key, (time.Duration(seconds) * time.Second).Truncate(time.Hour))
		return nil
	})
	return err
}

func (s *Store) lookForLeft(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var messages, keys int64
	err := conn.QueryRow(ctx, `SELECT count(*), count(DISTINCT key) FROM (SELECT key FROM `+s.table.names.waiting+` WHERE consumer = $1 LIMIT $2) AS counted`,
		s.consumer, mostCounted).Scan(&messages, &keys)
	if err != nil || messages == 0 {
		return err
	}
	found.Add("set ConsumerConfig.ParkKeys, replay or remove the dead letters, and switch it off when they are gone; if the messages are worthless, "+s.deleteParked(s.consumer),
		"%d messages of %d ordering keys of consumer %q are parked, and its ParkKeys is off: they stay, and later ones of their keys overtake them",
		messages, keys, s.consumer)
	return nil
}

func (s *Store) deleteParked(consumer string) string {
	where := " WHERE consumer = " + quoted(consumer)
	return "DELETE FROM " + s.table.names.waiting + where + ", and then DELETE FROM " + s.table.names.stopped + where
}

// quoted returns a text as an SQL literal.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

package inboxpgx

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
)

const (
	// stoppedGrace is for how long an ordering key may be stopped before Check tells.
	stoppedGrace = 24 * time.Hour

	// keyShown is how many characters of a key a finding shows.
	keyShown = 64

	// mostCounted bounds what is counted for a finding.
	mostCounted = 100_000
)

// lookForParked finds ordering keys that an operator has forgotten, of this consumer and of others,
// and messages that no consumer of this Store goes on with.
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

// quoted is a text as a literal of SQL.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

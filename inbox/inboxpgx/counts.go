package inboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// countLimit is where the counts stop: as many means as many or more.
const countLimit = 100_000

// countTimeout bounds one try of a count.
const countTimeout = 4 * time.Second

// Processed returns how many messages the consumer has processed in the last d, by the clock of the entries: at
// most 100,000, which means as many or more.
func (s *Store) Processed(ctx context.Context, d time.Duration) (int, error) {
	return s.entries.Processed(ctx, s.consumer, d)
}

// Behind returns how many messages wait behind the dead letter that has stopped an ordering key: at most 100,000,
// which means as many or more. It is 0 where keys are not parked, and with Config.Entries.
func (s *Store) Behind(ctx context.Context, key string) (int, error) {
	if s.table == nil {
		return 0, nil
	}
	return s.table.counted(ctx, "behind", s.table.names.waiting, `key = $3 AND class IS NULL`, s.consumer, key)
}

// Processed implements driver.Entries.
func (t *table) Processed(ctx context.Context, consumer string, d time.Duration) (int, error) {
	return t.counted(ctx, "processed", t.names.entries, `processed_at > now() - $3::interval`, consumer, d)
}

func (t *table) counted(ctx context.Context, what, table, where, consumer string, arg any) (n int, err error) {
	err = pgcall.Twice(ctx, t.pool, countTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM `+table+` WHERE consumer = $1 AND `+where+` LIMIT $2) AS counted`, consumer, countLimit, arg).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: %s: %w", what, t.missing.Explain(err))
	}
	return n, nil
}

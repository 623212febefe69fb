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

// Processed returns how many messages the consumer has processed in the last d, by the clock of the database: at
// most 100,000, which means as many or more. With Config.Entries it is 0.
func (s *Store) Processed(ctx context.Context, d time.Duration) (int, error) {
	if s.table == nil {
		return 0, nil
	}
	return s.counted(ctx, "processed", s.table.names.entries, `processed_at > now() - $3::interval`, d)
}

// Behind returns how many messages wait behind the dead letter that has stopped an ordering key: at most 100,000,
// which means as many or more. It is 0 where keys are not parked, and with Config.Entries.
func (s *Store) Behind(ctx context.Context, key string) (int, error) {
	if s.table == nil {
		return 0, nil
	}
	return s.counted(ctx, "behind", s.table.names.parked, `key = $3 COLLATE "C" AND class IS NULL`, key)
}

func (s *Store) counted(ctx context.Context, what, table, where string, arg any) (n int, err error) {
	err = pgcall.Twice(ctx, s.pool, countTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM `+table+` WHERE consumer = $1 AND `+where+` LIMIT $2) AS counted`, s.consumer, countLimit, arg).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: %s: %w", what, s.table.missing.Explain(err))
	}
	return n, nil
}

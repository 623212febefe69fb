package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Renew implements driver.Source. Like a claim it does not wait for the disk. Nor does it wait for the pool: handlers
// and requests of the process may hold all its connections for longer than a lease.
func (s *Store) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	if ttl < time.Microsecond {
		return nil, fmt.Errorf("outboxpgx: renewal for %v", ttl)
	}
	lanes, tokens := columnsOfLeases(leases)
	held := heldLanes{}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lock, lanes, tokens).Query(held.read)
	var renewed int64
	queue.Queue(s.sql.renew, lanes, tokens, ttl.Microseconds()).Exec(func(tag pgconn.CommandTag) error {
		renewed = tag.RowsAffected()
		return nil
	})
	queue.Queue(commitSQL)
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = s.renewals.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error { return conn.SendBatch(ctx, queue).Close() })
	if lost := int64(len(held)) - renewed; err == nil && lost > 0 {
		err = pgcall.Ignored(s.t.lanes, fmt.Sprintf("the renewal of %d leases", lost))
	}
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: renew: %w", s.t.explain(err))
	}
	return held.stale(leases), nil
}

// heldLanes are those whose token is still that of their lease.
type heldLanes map[int16]bool

// read takes the result of lock.
func (h heldLanes) read(rows pgx.Rows) error {
	lanes, err := pgx.CollectRows(rows, pgx.RowTo[int16])
	for _, lane := range lanes {
		h[lane] = true
	}
	return err
}

func (h heldLanes) stale(leases []driver.Lease) (stale []driver.Lease) {
	for _, l := range leases {
		if !h[int16(l.Lane)] {
			stale = append(stale, l)
		}
	}
	return stale
}

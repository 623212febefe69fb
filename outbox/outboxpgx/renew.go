package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Renew implements driver.Source. Like a claim it does not wait for the disk.
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
	queue.Queue(s.sql.renew, lanes, tokens, ttl.Microseconds())
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
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

// readArray takes the result of settle.
func (h heldLanes) readArray(row pgx.Row) error {
	var lanes []int16
	err := row.Scan(&lanes)
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

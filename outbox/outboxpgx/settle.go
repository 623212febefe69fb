package outboxpgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Settle implements driver.Source.
func (s *Store) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) ([]driver.Lease, error) {
	if len(b.Leases) == 0 {
		return nil, nil
	}
	lanes, tokens := columnsOfLeases(b.Leases)
	held := heldLanes{}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.sql.lock, lanes, tokens).Query(held.read)
	s.settlement(queue, lanes, tokens, outcomes)
	limit, era := s.horizon.limit()
	queue.Queue(s.sql.close, lanes, tokens, limit, era)
	ask := s.horizon.question()
	var writers []string
	if ask.number != 0 {
		queue.Queue(s.sql.writers, s.t.outbox).Query(func(rows pgx.Rows) (err error) {
			writers, err = pgx.CollectRows(rows, pgx.RowTo[string])
			return err
		})
	}
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		s.horizon.forget()
		return nil, fmt.Errorf("outboxpgx: settle: %w", s.t.explain(err))
	}
	s.horizon.answer(ask, writers)
	return held.stale(b.Leases), nil
}

// settlement queues one statement for each verdict that occurs.
func (s *Store) settlement(queue *pgx.Batch, lanes []int16, tokens []int64, outcomes []driver.Settlement) {
	by := map[driver.Verdict]*columnsOf{}
	for _, v := range []driver.Verdict{driver.Published, driver.Failed, driver.Dead} {
		by[v] = &columnsOf{}
	}
	for _, o := range outcomes {
		if c := by[o.Verdict]; c != nil {
			c.add(o)
		}
	}
	if c := by[driver.Published]; len(c.ids) > 0 {
		sql := s.sql.delete
		if s.cfg.Retention > 0 {
			sql = s.sql.keep
		}
		queue.Queue(sql, lanes, tokens, c.ids)
	}
	if c := by[driver.Failed]; len(c.ids) > 0 {
		queue.Queue(s.sql.fail, lanes, tokens, c.ids, c.delays, c.classes, c.errors)
	}
	if c := by[driver.Dead]; len(c.ids) > 0 {
		queue.Queue(s.sql.bury, lanes, tokens, c.ids, c.classes, c.errors)
	}
}

// uuids is an array that the client encodes in binary. Of []uuid.UUID it makes texts first, twenty
// times as much work, and without prepared statements it knows no such array.
type uuids = pgtype.FlatArray[pgtype.UUID]

// columnsOf are outcomes as one array per column.
type columnsOf struct {
	ids     uuids
	delays  []int64 // microseconds
	classes []string
	errors  []string
}

func (c *columnsOf) add(o driver.Settlement) {
	c.ids = append(c.ids, pgtype.UUID{Bytes: o.ID, Valid: true})
	c.delays = append(c.delays, o.Delay.Microseconds())
	c.classes = append(c.classes, string(o.Class))
	c.errors = append(c.errors, o.Err)
}

func columnsOfLeases(leases []driver.Lease) (lanes []int16, tokens []int64) {
	for _, l := range leases {
		lanes, tokens = append(lanes, int16(l.Lane)), append(tokens, l.Token)
	}
	return lanes, tokens
}

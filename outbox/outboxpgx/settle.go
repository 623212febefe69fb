package outboxpgx

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Settle implements driver.Source. A message that another session has locked is given back, so that it holds up no other;
// and one that a trigger or a constraint keeps from being deleted is marked, and left to Prune.
func (s *Store) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	if len(b.Leases) == 0 {
		return driver.Settled{}, nil
	}
	keep := s.cfg.Retention > 0
	settled, err := s.settle(ctx, b, outcomes, keep)
	switch c := code(err); {
	case c == lockNotAvailable:
		var free []driver.Settlement
		if free, err = s.withoutLocked(ctx, b, outcomes); err == nil {
			s.complain(ctx, "outboxpgx: messages whose rows another session has locked are published again", slog.Int("messages", len(outcomes)-len(free)))
			settled, err = s.settle(ctx, b, free, keep)
		}
	case !keep && (c == raisedException || strings.HasPrefix(c, integrityViolation)):
		refused := err
		if settled, err = s.settle(ctx, b, outcomes, true); err == nil {
			s.complain(ctx, "outboxpgx: published messages cannot be deleted, and are marked", slog.Any("error", refused))
		}
	}
	if err != nil {
		return driver.Settled{}, fmt.Errorf("outboxpgx: settle: %w", s.t.explain(err))
	}
	return settled, nil
}

// settle takes one round trip, and looks at what is left after its commit: whoever was woken for that before has found the
// lanes leased.
func (s *Store) settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement, keep bool) (driver.Settled, error) {
	lanes, tokens := columnsOfLeases(b.Leases)
	held := heldLanes{}
	var settled driver.Settled
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.settle, s.settlement(lanes, tokens, outcomes, keep)...).QueryRow(held.readArray)
	ask := s.horizon.question()
	var writers []string
	if ask.number != 0 {
		queue.Queue(s.sql.writers, s.t.outbox).Query(func(rows pgx.Rows) (err error) {
			writers, err = pgx.CollectRows(rows, pgx.RowTo[string])
			return err
		})
	}
	committed := false
	queue.Queue(commitGoOnSQL).Exec(func(pgconn.CommandTag) error {
		committed = true
		return nil
	})
	queue.Queue(s.sql.look, lanes).QueryRow(func(row pgx.Row) error { return row.Scan(&settled.More) })
	queue.Queue(commitSQL)
	err := s.send(ctx, queue)
	if err != nil && committed { // the batch is settled: only the look at what is left has failed
		settled.More, err = true, nil
	}
	if err != nil {
		s.horizon.forget()
		return driver.Settled{}, err
	}
	s.horizon.answer(ask, writers)
	settled.Stale = held.stale(b.Leases)
	return settled, nil
}

// settlement returns the arguments of settleSQL.
func (s *Store) settlement(lanes []int16, tokens []int64, outcomes []driver.Settlement, keep bool) []any {
	published, failed, dead := newColumns(len(outcomes)), newColumns(0), newColumns(0)
	by := map[driver.Verdict]*columnsOf{driver.Published: published, driver.Failed: failed, driver.Dead: dead}
	for _, o := range outcomes {
		if c := by[o.Verdict]; c != nil {
			c.add(o)
		}
	}
	limit, era := s.horizon.limit()
	return []any{
		lanes, tokens, published.ids, keep, failed.ids, failed.delays, failed.classes, failed.errors,
		dead.ids, dead.classes, dead.errors, limit, era,
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

// newColumns returns empty columns with room for so many ids. An empty array is not NULL.
func newColumns(room int) *columnsOf {
	return &columnsOf{ids: make(uuids, 0, room), delays: []int64{}, classes: []string{}, errors: []string{}}
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

package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Settle implements driver.Source. A message that another session has locked is given back, so that it holds up no other.
// Where the server refuses the outcomes together, they are recorded one by one: published messages are marked then, and left to
// Prune. An outcome that is refused alone is kept in memory and tried again: see refusals.
func (s *Store) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	if len(b.Leases) == 0 {
		return driver.Settled{}, nil
	}
	outcomes = append(slices.Clone(outcomes), s.refusals.again(b.Leases)...)
	keep := s.cfg.Retention > 0
	r, err := s.settle(ctx, b, outcomes, keep, false)
	if sqlstate.Of(err) == lockNotAvailable {
		all := len(outcomes)
		if outcomes, err = s.withoutLocked(ctx, b, outcomes); err == nil {
			s.complain(ctx, "outboxpgx: messages whose rows another session has locked are published again", slog.Int("messages", all-len(outcomes)))
			r, err = s.settle(ctx, b, outcomes, keep, false)
		}
	}
	if sqlstate.Refused(err) {
		whole := err
		if r, err = s.settle(ctx, b, outcomes, true, true); err == nil && !keep && len(r.ids) < len(outcomes) {
			s.complain(ctx, "outboxpgx: published messages cannot be deleted, and are marked", slog.Any("error", whole))
		}
	}
	if err != nil {
		return driver.Settled{}, fmt.Errorf("outboxpgx: settle: %w", s.t.explain(err))
	}
	return s.settled(ctx, b, outcomes, r), nil
}

// settled notes what a settlement could not record.
func (s *Store) settled(ctx context.Context, b driver.Batch, outcomes []driver.Settlement, r recorded) driver.Settled {
	if r.marked > 0 {
		s.complain(ctx, "outboxpgx: published messages cannot be deleted, and are marked", slog.Any("error", pgcall.Ignored(s.t.outbox, "their DELETE")))
	}
	s.refusals.note(b, outcomes, r.failures(s.t.outbox))
	settled := driver.Settled{Stale: r.held.stale(b.Leases), More: r.more, Refused: s.refusals.err()}
	if r.dropped > 0 {
		settled.Refused = errors.Join(settled.Refused, pgcall.Ignored(s.t.lanes, fmt.Sprintf("the release of %d leases", r.dropped)))
	}
	if settled.Refused != nil {
		s.complain(ctx, "outboxpgx: could not record outcomes", slog.Any("error", settled.Refused))
	}
	return settled
}

// recorded is what came of a settlement at the server.
type recorded struct {
	held    heldLanes
	more    bool
	marked  int        // messages that should be gone
	ids     [][16]byte // whose outcomes could not be recorded
	reasons []string   // for each of ids, where there was an error
	dropped int        // leases that could not be released
}

func (r *recorded) read(row pgx.Row) error {
	var lanes []int16
	err := row.Scan(&lanes, &r.marked, &r.ids, &r.reasons, &r.dropped)
	for _, lane := range lanes {
		r.held[lane] = true
	}
	return err
}

// failures returns why the outcome of each message could not be recorded.
func (r *recorded) failures(table string) map[uuid.UUID]error {
	failures := make(map[uuid.UUID]error, len(r.ids))
	for i, id := range r.ids {
		if i < len(r.reasons) && r.reasons[i] != "" {
			failures[id] = errors.New(r.reasons[i])
		} else {
			failures[id] = pgcall.Ignored(table, "the outcome")
		}
	}
	return failures
}

// settle takes one round trip, and looks at what is left after its commit: whoever was woken for that before has found the
// lanes leased.
func (s *Store) settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement, keep, singly bool) (recorded, error) {
	lanes, tokens := columnsOfLeases(b.Leases)
	r := recorded{held: heldLanes{}}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.settle, append(s.settlement(lanes, tokens, outcomes, keep), singly)...).QueryRow(r.read)
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
	queue.Queue(s.sql.look, lanes).QueryRow(func(row pgx.Row) error { return row.Scan(&r.more) })
	queue.Queue(commitSQL)
	err := s.send(ctx, queue)
	if err != nil && committed { // the batch is settled: only the look at what is left has failed
		r.more, err = true, nil
	}
	if err != nil {
		s.horizon.forget()
		return recorded{}, err
	}
	s.horizon.answer(ask, writers)
	return r, nil
}

// settlement returns the arguments of settleSQL, but the last.
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

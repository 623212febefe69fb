package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Settle implements driver.Source. It releases a message that another session has locked, so that the message does
// not block others. If the server refuses the outcomes together, Settle records them one by one. It then marks
// published messages, and Prune deletes them. An outcome that is refused alone is kept in memory and retried: see
// refusals.
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
			s.complain(ctx, "outboxpgx: released locked messages unsettled", slog.Int("messages", all-len(outcomes)))
			r, err = s.settle(ctx, b, outcomes, keep, false)
		}
	}
	if sqlstate.Refused(err) {
		whole := err
		if r, err = s.settle(ctx, b, outcomes, true, true); err == nil && !keep && len(r.ids) < len(outcomes) {
			s.complain(ctx, "outboxpgx: could not delete published messages; marked them", slog.Any("error", whole))
		}
	}
	if err != nil {
		return driver.Settled{}, fmt.Errorf("outboxpgx: settle: %w", s.t.explain(err))
	}
	return s.settled(ctx, b, outcomes, r), nil
}

// settled handles the outcomes that a settlement could not record, and returns the result.
func (s *Store) settled(ctx context.Context, b driver.Batch, outcomes []driver.Settlement, r recorded) driver.Settled {
	if r.marked > 0 {
		s.complain(ctx, "outboxpgx: could not delete published messages; marked them", slog.Any("error", pgcall.Ignored(s.t.outbox, "their DELETE")))
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

// recorded is the server's result of a settlement.
type recorded struct {
	held    heldLanes
	more    bool
	marked  int        // messages marked because they could not be deleted
	ids     [][16]byte // the messages whose outcomes could not be recorded
	reasons []string   // the errors for ids; empty if there was none
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

// failures returns the reasons why outcomes could not be recorded, by message.
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

// settle takes one round trip. After its commit it checks whether ready messages are left, because earlier wake-ups
// for them found the lanes leased.
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
	if err != nil && committed { // the batch is settled; only the check for more messages failed
		r.more, err = true, nil
	}
	if err != nil {
		s.horizon.forget()
		return recorded{}, err
	}
	s.horizon.answer(ask, writers)
	return r, nil
}

// settlement returns the arguments of settleSQL except the last one.
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

// uuids is an array that the client encodes in binary. It would convert []uuid.UUID to texts, which takes twenty
// times as long, and it cannot encode []uuid.UUID without prepared statements.
type uuids = pgtype.FlatArray[pgtype.UUID]

// columnsOf are outcomes as one array per column.
type columnsOf struct {
	ids     uuids
	delays  []int64 // microseconds
	classes []string
	errors  []string
}

// newColumns returns empty columns with room for the given number of ids. An empty array is not NULL.
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

// withoutLocked returns the outcomes that can be recorded now. It leaves out messages that another session has
// locked, and the later messages of their keys.
func (s *Store) withoutLocked(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) ([]driver.Settlement, error) {
	ids := newColumns(len(b.Messages))
	for _, m := range b.Messages {
		ids.add(driver.Settlement{ID: m.ID})
	}
	locked := map[uuid.UUID]bool{}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.sql.locked, ids.ids).Query(func(rows pgx.Rows) error {
		var id [16]byte
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
			locked[id] = true
			return nil
		})
		return err
	})
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		return nil, err
	}
	left, stuck := map[uuid.UUID]bool{}, stuckKeys{}
	for _, m := range b.Messages {
		left[m.ID] = stuck.leaveOut(m.Key, locked[m.ID])
	}
	return slices.DeleteFunc(slices.Clone(outcomes), func(o driver.Settlement) bool { return left[o.ID] }), nil
}

// complain logs a repeated warning, but seldom.
func (s *Store) complain(ctx context.Context, what string, attrs ...slog.Attr) {
	if repeats, ok := s.complaints.Due(what); ok {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, what, append(attrs, slog.Int("repeats", repeats))...)
	}
}

// refusals holds the outcomes that the table refused or ignored. Their messages are still ready in the table. Claims
// of this Store do not return them, so they are not published again. The Store retries recording the outcomes with
// later settlements of the lane. A failed message also holds back the later messages of its key; a published one does
// not.
//
// There are few refusals, because such messages are the first of their lane, and a claim reads no more of a lane than
// it returns.
type refusals struct {
	mu      sync.Mutex
	byID    map[uuid.UUID]*refusal
	looked  time.Time // last check for messages that are gone
	empties int       // claims in a row that found nothing else
}

type refusal struct {
	outcome driver.Settlement
	lane    int
	reason  error
	tried   time.Time
}

const (
	// refusedDelay is the time until the next claim if rows could not be released, or if their outcomes were
	// refused.
	refusedDelay = time.Second
	// retryRefused is the time between two attempts to record a refused outcome.
	retryRefused = 5 * time.Second
)

// of returns the refused outcome of a message, if there is one.
func (r *refusals) of(id uuid.UUID) (driver.Settlement, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.byID[id]; known != nil {
		return known.outcome, true
	}
	return driver.Settlement{}, false
}

// again returns the refused outcomes of the leased lanes that are due for a retry.
func (r *refusals) again(leases []driver.Lease) (outcomes []driver.Settlement) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 {
		return nil
	}
	leased := map[int]bool{}
	for _, l := range leases {
		leased[l.Lane] = true
	}
	for _, known := range r.byID {
		if leased[known.lane] && time.Since(known.tried) >= retryRefused {
			outcomes = append(outcomes, known.outcome)
		}
	}
	return outcomes
}

// note records the results of outcomes: the messages in failures were refused.
func (r *refusals) note(b driver.Batch, outcomes []driver.Settlement, failures map[uuid.UUID]error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 && len(failures) == 0 {
		return
	}
	lanes := map[uuid.UUID]int{}
	for _, m := range b.Messages {
		lanes[m.ID] = driver.LaneOf(m)
	}
	for _, o := range outcomes {
		reason := failures[o.ID]
		known := r.byID[o.ID]
		switch {
		case reason == nil && known != nil:
			r.looked = time.Time{} // it was recorded, or the lease was lost
		case reason == nil:
		case known != nil:
			known.reason, known.tried = reason, time.Now()
		default:
			if r.byID == nil {
				r.byID = map[uuid.UUID]*refusal{}
			}
			r.byID[o.ID] = &refusal{outcome: o, lane: lanes[o.ID], reason: reason, tried: time.Now()}
		}
	}
}

// err returns an error that names one of the messages, or nil if there is none.
func (r *refusals) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, known := range r.byID {
		return fmt.Errorf("outboxpgx: could not record the outcomes of %d messages; message %s: %w", len(r.byID), id, known.reason)
	}
	return nil
}

// rest reports whether to wait before the next claim. A claim returns only a few of the lanes, so only several claims
// in a row show that nothing else is ready.
func (r *refusals) rest(found bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if found {
		r.empties = 0
		return false
	}
	r.empties++
	return r.empties > driver.Lanes/defaultLanesPerClaim
}

// ids returns the messages if a check is due whether they are gone: another relay may have settled them, or somebody
// may have removed them.
func (r *refusals) ids() (ids uuids) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 || time.Since(r.looked) < retryRefused {
		return nil
	}
	r.looked = time.Now()
	for id := range r.byID {
		ids = append(ids, pgtype.UUID{Bytes: id, Valid: true})
	}
	return ids
}

// keep forgets the asked messages that are not in there.
func (r *refusals) keep(asked uuids, there map[uuid.UUID]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range asked {
		if !there[id.Bytes] {
			delete(r.byID, id.Bytes)
		}
	}
}

// forgetGone forgets refused outcomes of messages that are no longer ready.
func (s *Store) forgetGone(ctx context.Context) error {
	ids := s.refusals.ids()
	if len(ids) == 0 {
		return nil
	}
	there := map[uuid.UUID]bool{}
	err := s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, _ := conn.Query(ctx, s.sql.stillReady, ids) // ForEachRow returns its error
		var id [16]byte
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
			there[id] = true
			return nil
		})
		return err
	})
	if err == nil {
		s.refusals.keep(ids, there)
	}
	return err
}

// Renew implements driver.Source. Like a claim, it does not wait for the disk. It uses a reserved connection and does
// not wait for the pool, because handlers and requests of the process may hold all pool connections for longer than a
// lease.
func (s *Store) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	if ttl < time.Microsecond {
		return nil, fmt.Errorf("outboxpgx: renew: ttl is %v, want at least 1 µs", ttl)
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

// heldLanes has the lanes whose token is still the token of the lease.
type heldLanes map[int16]bool

// read reads the result of lockSQL.
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

// settleSQL settles a batch. It returns the lanes that were still leased, and the outcomes that could not be
// recorded. lookSQL returns whether a row of these lanes is ready: see migrations/0006_outbox_relay.sql. $1 lanes, $2
// tokens, $3 published ids, $4 whether they are kept, $5 failed ids, $6 microseconds, $7 classes, $8 errors, $9 dead
// ids, $10 classes, $11 errors, $12 horizon, $13 its era, $14 whether outcomes are recorded one by one.
const (
	settleSQL = `
SELECT ours, marked, refused, reasons, dropped
FROM {settle}($1::smallint[], $2::bigint[], $3::uuid[], $4::boolean, $5::uuid[], $6::bigint[], $7::text[], $8::text[],
  $9::uuid[], $10::text[], $11::text[], $12::bigint, $13::bigint, $14::boolean)`
	lookSQL = `SELECT {look}($1::smallint[])`
)

// stillReadySQL returns the messages that are ready. $1 ids.
const stillReadySQL = `SELECT o.id FROM {outbox} o WHERE o.id = ANY($1::uuid[]) AND {ready}`

// lockedSQL returns the messages that another session has locked. $1 ids.
const lockedSQL = `SELECT o.id FROM {outbox} o WHERE o.id = ANY($1::uuid[]) AND ({free}) IS NULL`

// lockSQL locks and returns the lanes whose token is still the token of the lease. $1 lanes, $2 tokens.
const lockSQL = `
SELECT l.lane FROM {lanes} l JOIN unnest($1::smallint[], $2::bigint[]) AS b(lane, token) ON l.lane = b.lane AND l.token = b.token
ORDER BY l.lane FOR UPDATE OF l`

// renewSQL extends the leases of the lanes that lockSQL has locked. $1 lanes, $2 tokens, $3 microseconds.
const renewSQL = `
UPDATE {lanes} l SET lease_until = now() + $3 * interval '1 microsecond'
FROM unnest($1::smallint[], $2::bigint[]) AS b(lane, token) WHERE l.lane = b.lane AND l.token = b.token`

package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

// script draws calls and notes their results. Which calls it draws does not depend on the results, nor
// on how a store deals out its lanes.
type script struct {
	side
	rng     *rand.Rand
	trace   []string
	written []outbox.Message
	held    []driver.Batch // not settled
	old     []driver.Batch // settled
	claimed int
}

func newScript(s side, seed uint64) *script {
	return &script{side: s, rng: rand.New(rand.NewPCG(seed, 1))}
}

func (s *script) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf(format, args...))
}

func (s *script) run(ctx context.Context) {
	steps := []func(context.Context){s.transact, s.transact, s.transact, s.claim, s.claim, s.settle, s.settle, s.settleAgain, s.renew, s.replayDead, s.measure}
	for range 20 {
		steps[s.rng.IntN(len(steps))](ctx)
	}
	s.settle(ctx)
	s.claim(ctx)
	s.measure(ctx)
}

var errOnPurpose = errors.New("on purpose")

func (s *script) transact(ctx context.Context) {
	readOnly := s.rng.IntN(10) == 0
	err := s.manager.DoWith(ctx, txretry.Options{ReadOnly: readOnly}, func(ctx context.Context, tx pgx.Tx) error {
		return s.inside(ctx, tx, 0)
	})
	s.note("transaction, read only %v: %s", readOnly, kind(err))
}

// inside runs some calls in a transaction or a savepoint.
func (s *script) inside(ctx context.Context, tx pgx.Tx, depth int) error {
	for range 1 + s.rng.IntN(3) {
		switch n := s.rng.IntN(12); {
		case n < 6:
			var msgs []outbox.Message
			for range s.rng.IntN(5) {
				msgs = append(msgs, s.message())
			}
			s.note("write %d: %s", len(msgs), kind(s.writer.Write(ctx, tx, msgs...)))
		case n < 8:
			key := fmt.Sprintf("once %d", s.rng.IntN(3))
			id, first, err := s.writer.WriteOnce(ctx, tx, key, s.message())
			s.note("write %q: %s first %v: %s", key, id, first, kind(err))
		case n < 9:
			s.note("a statement fails: %s", kind(s.fail(ctx, tx)))
		case depth < 2:
			err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return s.inside(ctx, sp, depth+1) })
			s.note("savepoint: %s", kind(err))
		}
	}
	if s.rng.IntN(5) == 0 {
		return errOnPurpose
	}
	return nil
}

// message draws one; now and then it is not valid, or has the id of an earlier one.
func (s *script) message() outbox.Message {
	var id uuid.UUID
	for i := range id {
		id[i] = byte(s.rng.Uint32())
	}
	id[6], id[8] = id[6]&0x0f|0x70, id[8]&0x3f|0x80
	m := outbox.Message{ID: id, Name: "order.placed", Body: fmt.Appendf(nil, `{"n": %d}`, len(s.written))}
	if s.rng.IntN(3) > 0 {
		m.Key = fmt.Sprintf("key %d", s.rng.IntN(4))
	}
	if s.rng.IntN(4) == 0 {
		m.Headers = map[string]string{"tenant": "7"}
		m.Route = outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}
	}
	switch n := s.rng.IntN(20); {
	case n == 0:
		m.Name = "Order Placed"
	case n == 1 && len(s.written) > 0:
		m.ID = s.written[s.rng.IntN(len(s.written))].ID
	case n == 2:
		m.NotBefore = time.Now().Add(time.Hour)
	}
	s.written = append(s.written, m)
	return m
}

// claim takes all that is ready, in as many batches as the store likes. A claim that skips everything goes
// first: a store may bring back what is due only behind what is ready, and in lanes that are leased by then.
func (s *script) claim(ctx context.Context) {
	s.settle(ctx) // which lanes are leased beside those of the messages is the store's own affair
	none, err := s.source.Claim(ctx, driver.Claim{Limit: 1, Lease: time.Hour, Skip: []string{""}})
	s.note("claimed %d of no transport: %s", len(none.Messages), kind(err))
	var all []driver.Message
	for looks := 0; looks < 20; {
		b, err := s.source.Claim(ctx, driver.Claim{Limit: 1000, Lease: time.Hour, Alone: len(s.held) == 0})
		if err != nil {
			s.note("claim: %s", kind(err))
			return
		}
		if len(b.Leases) > 0 {
			s.held = append(s.held, b)
			all = append(all, b.Messages...)
			continue
		}
		if looks++; !b.More {
			break
		}
	}
	s.claimed += len(all)
	slices.SortStableFunc(all, func(a, b driver.Message) int {
		if a.Key == "" && b.Key == "" {
			return slices.Compare(a.ID[:], b.ID[:])
		}
		return slices.Compare([]byte(a.Key), []byte(b.Key))
	})
	s.note("claimed %d", len(all))
	for _, m := range all {
		s.note("  %s", show(m))
	}
}

func show(m driver.Message) string {
	m.CreatedAt = time.Time{}
	return fmt.Sprintf("%+v", m)
}

// settle decides about each message by its id.
func (s *script) settle(ctx context.Context) {
	salt, stale := byte(s.rng.Uint32()), 0
	for _, b := range s.held {
		var outcomes []driver.Settlement
		for _, m := range b.Messages {
			o := driver.Settlement{ID: m.ID, Class: driver.Retryable, Err: "on purpose"}
			switch n := (m.ID[15] ^ salt) % 8; {
			case n < 3:
				o.Verdict = driver.Published
			case n < 4:
				o.Verdict, o.Delay = driver.Failed, time.Hour
			case n < 5:
				o.Verdict = driver.Failed
			case n < 7:
				o.Verdict, o.Class = driver.Dead, driver.Permanent
			default:
				continue
			}
			outcomes = append(outcomes, o)
		}
		settled, err := s.source.Settle(ctx, b, outcomes)
		if stale += len(settled.Stale); err != nil {
			s.note("settle: %s", kind(err))
		}
	}
	s.note("settled, %d stale", stale)
	s.old, s.held = s.held, nil
}

func (s *script) settleAgain(ctx context.Context) {
	held, stale := 0, 0
	for _, b := range s.old {
		settled, err := s.source.Settle(ctx, b, nil)
		if stale, held = stale+len(settled.Stale), held+len(b.Leases); err != nil {
			s.note("settle again: %s", kind(err))
		}
	}
	s.note("settled again, all stale %v", stale == held)
}

func (s *script) renew(ctx context.Context) {
	for _, b := range slices.Concat(s.held, s.old) {
		lost, err := s.source.Renew(ctx, b.Leases, time.Hour)
		if whole := len(lost) == 0 || len(lost) == len(b.Leases); err != nil || !whole {
			s.note("renew: %d of %d stale: %s", len(lost), len(b.Leases), kind(err))
		}
	}
	s.note("renewed")
}

// replayDead lists the dead letters and replays or removes one, or one that is none, or all, or tries to.
func (s *script) replayDead(ctx context.Context) {
	pick := s.rng.Uint32()
	letters, err := s.dead.List(ctx, outbox.Filter{})
	slices.SortFunc(letters, func(a, b outbox.DeadLetter) int { return slices.Compare(a.ID[:], b.ID[:]) })
	s.note("%d dead letters: %s", len(letters), kind(err))
	for _, l := range letters {
		l.CreatedAt, l.FailedAt, l.Fingerprint, l.Cursor = time.Time{}, time.Time{}, "", ""
		s.note("  %+v", l)
	}
	groups, err := s.dead.Groups(ctx, outbox.Filter{})
	s.note("in groups: %s", kind(err))
	var kinds []string
	for _, g := range groups {
		kinds = append(kinds, fmt.Sprintf("  %d of %s, as %q for %s", g.Count, g.Sample.Class, g.Sample.Error, g.Sample.Name))
	}
	slices.Sort(kinds)
	s.note("%s", strings.Join(kinds, "\n"))
	id := uuid.UUID{1}
	if len(letters) > 0 {
		id = letters[int(pick)%len(letters)].ID
	}
	one := outbox.Filter{IDs: []uuid.UUID{id}}
	n, err := s.dead.Count(ctx, one)
	s.note("%d of them: %s", n, kind(err))
	switch pick % 7 {
	case 0:
		s.removeDead(ctx, one)
		return
	case 1:
		s.removeDead(ctx, outbox.Filter{Class: string(driver.Permanent)})
		return
	case 2, 3:
		one = outbox.Filter{}
	}
	how := outbox.Replay{By: "me", DryRun: pick%3 == 0, Progress: func(r outbox.Replayed) { s.note("  %+v so far", r) }}
	if pick%5 < 2 {
		how.Edit = func(m outbox.Message) ([]byte, error) {
			if pick%5 == 0 {
				return nil, errOnPurpose
			}
			return append([]byte("edited "), m.Body...), nil
		}
	}
	replayed, err := s.dead.Replay(ctx, one, how)
	s.note("%+v: %s", replayed, kind(err))
}

func (s *script) removeDead(ctx context.Context, f outbox.Filter) {
	n, err := s.dead.Remove(ctx, f, outbox.Removal{By: "me", Progress: func(removed int) { s.note("  %d so far", removed) }})
	s.note("%d removed: %s", n, kind(err))
}

func (s *script) measure(ctx context.Context) {
	stats, err := s.source.Depth(ctx)
	s.note("%d ready, %d parked, %d dead, aged %v: %s", stats.Ready, stats.Parked, stats.Dead, stats.OldestAge > 0, kind(err))
	for _, f := range []outbox.WaitingFilter{{}, {Parked: true}, {Limit: 2}, {Name: "a"}, {Limit: -1}} {
		found, err := s.source.Waiting(ctx, f)
		s.note("%d waiting for %+v: %s", len(found), f, kind(err))
		if f.Parked { // two that are due at one time come in any order
			slices.SortFunc(found, func(a, b outbox.Waiting) int { return slices.Compare(a.ID[:], b.ID[:]) })
		}
		for _, w := range found {
			s.note("  %s %s %q, %d attempts, due %t, %s %q", w.ID, w.Name, w.Body, w.Attempts, !w.DueAt.IsZero(), w.Class, w.Error)
		}
	}
}

// kind is what two errors must have in common.
func kind(err error) string {
	var state interface{ SQLState() string }
	var refused *outbox.MessageError
	switch {
	case err == nil:
		return "done"
	case errors.Is(err, errOnPurpose):
		return "on purpose"
	case errors.As(err, &refused):
		return "refused " + refused.Field
	case errors.As(err, &state):
		return state.SQLState()
	case errors.Is(err, pgx.ErrTxClosed):
		return "closed"
	}
	return err.Error()
}

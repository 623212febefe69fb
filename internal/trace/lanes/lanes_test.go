package lanes_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/trace/lanes"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// scripted is a store with prepared answers.
type scripted struct {
	batch driver.Batch
	stale []driver.Lease
}

func (s *scripted) Claim(context.Context, driver.Claim) (driver.Batch, error) { return s.batch, nil }

func (s *scripted) Renew(context.Context, []driver.Lease, time.Duration) ([]driver.Lease, error) {
	return s.stale, nil
}

func (s *scripted) Settle(context.Context, driver.Batch, []driver.Settlement) (driver.Settled, error) {
	return driver.Settled{Stale: s.stale}, nil
}

// holding is a publisher that confirms on request.
type holding struct{ done []func(error) }

func (h *holding) Publish(_ context.Context, _ driver.Message, done func(error)) {
	h.done = append(h.done, done)
}

// relay plays a relay by hand, on a store that answers as the test wants.
type relay struct {
	t      *testing.T
	store  *scripted
	source driver.Source
	to     driver.Publisher
	broker *holding
}

func newRelay(t *testing.T, log *lanes.Log) *relay {
	p, r := log.Process(), &relay{t: t, store: &scripted{}, broker: &holding{}}
	r.to = p.Publisher(r.broker)
	r.source = p.Source(r.store)
	return r
}

var first, second = driver.Message{ID: uuid.UUID{1}, Key: "k"}, driver.Message{ID: uuid.UUID{2}, Key: "k"}

// claim returns a batch of the lane with these messages.
func (r *relay) claim(token int64, ttl time.Duration, msgs ...driver.Message) driver.Batch {
	r.store.batch = driver.Batch{Leases: []driver.Lease{{Lane: driver.LaneOf(first), Token: token}}, Messages: msgs}
	b, _ := r.source.Claim(r.t.Context(), driver.Claim{Limit: 9, Lease: ttl})
	return b
}

func (r *relay) publish(msgs ...driver.Message) {
	for _, m := range msgs {
		r.to.Publish(r.t.Context(), m, func(error) {})
	}
}

// answer answers all open messages.
func (r *relay) answer(err error) {
	for _, done := range r.broker.done {
		done(err)
	}
	r.broker.done = nil
}

func (r *relay) settle(b driver.Batch, stale bool, v driver.Verdict, msgs ...driver.Message) {
	r.store.stale = nil
	if stale {
		r.store.stale = b.Leases
	}
	var all []driver.Settlement
	for _, m := range msgs {
		all = append(all, driver.Settlement{ID: m.ID, Verdict: v})
	}
	_, _ = r.source.Settle(r.t.Context(), b, all)
}

func (r *relay) renew(b driver.Batch, stale bool) {
	r.store.stale = nil
	if stale {
		r.store.stale = b.Leases
	}
	_, _ = r.source.Renew(r.t.Context(), b.Leases, time.Hour)
}

// The acceptor allows the runs of a correct relay, and refuses each run that differs from one in a single call.
func TestCheck_refusesMutatedRuns(t *testing.T) {
	t.Parallel()
	const long, short = time.Hour, time.Nanosecond
	lost := errors.New("refused by the broker")
	for name, tt := range map[string]struct {
		run  func(a, b *relay)
		good bool
	}{
		"one after the other": {func(a, b *relay) {
			batch := a.claim(1, long, first, second)
			a.publish(first)
			a.answer(nil)
			a.publish(second)
			a.answer(nil)
			a.settle(batch, false, driver.Published, first, second)
		}, true},
		"a lease expires and the lane is taken over": {func(a, b *relay) {
			batch := a.claim(1, short, first, second)
			a.publish(first)
			taken := b.claim(2, long, first, second)
			a.renew(batch, true)
			a.answer(nil)
			a.settle(batch, true, driver.Published, first)
			b.publish(first)
			b.answer(nil)
			b.publish(second)
			b.answer(nil)
			b.settle(taken, false, driver.Published, first, second)
		}, true},
		"the first message of a key is rejected": {func(a, b *relay) {
			batch := a.claim(1, long, first, second)
			a.publish(first)
			a.answer(lost)
			a.settle(batch, false, driver.Dead, first)
			batch = a.claim(2, long, second)
			a.publish(second)
			a.answer(nil)
			a.settle(batch, false, driver.Published, second)
		}, true},
		"a stale claim settles": {func(a, b *relay) {
			batch := a.claim(1, short, first, second)
			a.publish(first)
			taken := b.claim(2, long, first, second)
			a.answer(nil)
			a.settle(batch, false, driver.Published, first)
			b.publish(second)
			b.answer(nil)
			b.settle(taken, false, driver.Published, second)
		}, false},
		"a stale claim is renewed": {func(a, b *relay) {
			batch := a.claim(1, short, first)
			b.settle(b.claim(2, long, first), false, driver.Dead, first, second)
			a.renew(batch, false)
		}, false},
		"a leased lane is claimed": {func(a, b *relay) {
			a.claim(1, long, first)
			b.claim(2, long, first)
		}, false},
		"a token comes twice": {func(a, b *relay) {
			a.settle(a.claim(1, long, first), false, driver.Dead)
			a.claim(1, long, first)
		}, false},
		"a message is published before the confirm of the one before it": {func(a, b *relay) {
			batch := a.claim(1, long, first, second)
			a.publish(first, second)
			a.answer(nil)
			a.settle(batch, false, driver.Published, first, second)
		}, false},
		"a message is published twice in a round": {func(a, b *relay) {
			batch := a.claim(1, long, first, second)
			a.publish(first, first)
			a.answer(nil)
			a.settle(batch, false, driver.Published, first)
		}, false},
		"a message is published after its round": {func(a, b *relay) {
			a.settle(a.claim(1, long, first, second), false, driver.Dead)
			a.publish(first)
		}, false},
		"a message is published that was not claimed": {func(a, b *relay) {
			a.claim(1, long, first)
			a.publish(second)
		}, false},
		"a message is settled before its confirm": {func(a, b *relay) {
			batch := a.claim(1, long, first)
			a.publish(first)
			a.settle(batch, false, driver.Published, first)
			a.answer(nil)
		}, false},
		"a rejected message is settled as published": {func(a, b *relay) {
			batch := a.claim(1, long, first)
			a.publish(first)
			a.answer(lost)
			a.settle(batch, false, driver.Published, first)
		}, false},
		"a settled message is claimed again": {func(a, b *relay) {
			a.settle(a.claim(1, long, first), false, driver.Dead, first)
			a.settle(a.claim(2, long, first, second), false, driver.Dead, first, second)
		}, false},
		"a key is claimed from its second message": {func(a, b *relay) {
			a.settle(a.claim(1, long, second), false, driver.Dead, second)
			a.settle(a.claim(2, long, first), false, driver.Dead, first)
		}, false},
		"a message is never settled": {func(a, b *relay) {
			a.settle(a.claim(1, long, first), false, driver.Dead, first)
		}, false},
	} {
		log := lanes.New(true)
		err := log.Commit(func(begin func(), wrote func(...driver.Message)) error {
			begin()
			wrote(first, second)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		tt.run(newRelay(t, log), newRelay(t, log))
		if err := log.Check(); (err == nil) != tt.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Calls without an answer may have taken effect, or not, or late.
func TestCheck_allowsBothEffectsOfAnUnansweredCall(t *testing.T) {
	t.Parallel()
	for _, applied := range []bool{false, true} {
		log := lanes.New(false)
		a, b := newRelay(t, log), newRelay(t, log)
		batch := a.claim(1, time.Hour, first)
		a.publish(first)
		a.answer(nil)
		source := log.Process().Source(failing{})
		_, _ = source.Settle(t.Context(), batch, []driver.Settlement{{ID: first.ID, Verdict: driver.Published}})
		if applied {
			b.settle(b.claim(2, time.Hour, second), false, driver.Dead, second)
			a.settle(batch, true, driver.Published, first)
		} else {
			a.settle(batch, false, driver.Published, first)
		}
		if err := log.Check(); err != nil {
			t.Errorf("applied %v: %v", applied, err)
		}
	}
}

type failing struct{ driver.Source }

func (failing) Settle(context.Context, driver.Batch, []driver.Settlement) (driver.Settled, error) {
	return driver.Settled{}, errors.New("no answer")
}

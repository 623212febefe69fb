package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

// sequence is a processor that takes the effects of keyed messages and checks their order. A message
// that comes again after its effect changes nothing, as with a processor that remembers.
type sequence struct {
	t        *testing.T
	fail     func(m *inbox.Message) error // nil: no failures
	overlaps bool                         // messages of a key may be processed at once, but not out of order

	mu        sync.Mutex
	published int               // of each key
	number    map[uuid.UUID]int // of each message within its key
	next      map[string]int
	running   map[string]int
}

// publishKeyed publishes messages of so many keys, the keys taking turns.
func publishKeyed(t *testing.T, f ConsumerFixture, keys, each int) *sequence {
	t.Helper()
	s := &sequence{t: t, number: map[uuid.UUID]int{}, next: map[string]int{}, running: map[string]int{}}
	s.publish(f, keys, each)
	return s
}

// publish publishes so many more messages of each key.
func (s *sequence) publish(f ConsumerFixture, keys, each int) {
	s.t.Helper()
	msgs := make([]*inbox.Message, 0, keys*each)
	s.mu.Lock()
	for i := range keys * each {
		m := named("event")
		m.Key = fmt.Sprintf("key-%d", i%keys)
		s.number[m.ID] = s.published + i/keys
		msgs = append(msgs, m)
	}
	s.published += each
	s.mu.Unlock()
	f.Publish(s.t, msgs...)
}

// Process implements inbox.Processor.
func (s *sequence) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = s.one(m)
	}
	return results
}

func (s *sequence) one(m *inbox.Message) error {
	s.enter(m.Key, 1)
	defer s.enter(m.Key, -1)
	time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	if s.fail != nil {
		if err := s.fail(m); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.number[m.ID]
	if n > s.next[m.Key] {
		s.t.Errorf("number %d of %s is processed while %d is due", n, m.Key, s.next[m.Key])
	}
	s.next[m.Key] = max(s.next[m.Key], n+1)
	return nil
}

func (s *sequence) enter(key string, by int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[key] += by
	if s.running[key] > 1 && !s.overlaps {
		s.t.Errorf("two messages of %s are processed at once", key)
	}
}

// finished is how many messages have taken effect.
func (s *sequence) finished() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, next := range s.next {
		n += next
	}
	return n
}

func ordered(cfg ConsumerConfig) ConsumerConfig {
	cfg.Ordered = true
	cfg.Retry = inbox.RetryPolicy{MaxAttempts: 20, BaseDelay: 20 * time.Millisecond, MaxDelay: 50 * time.Millisecond}
	return cfg
}

// oneIn fails one in so many runs.
func oneIn(n int, err error) func(*inbox.Message) error {
	return func(*inbox.Message) error {
		if rand.IntN(n) == 0 {
			return err
		}
		return nil
	}
}

// Messages of one key are processed one at a time, in order and with their retries; other keys go on.
func testOrderOfKeys(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		const keys, each = 8, 12
		s := publishKeyed(t, f, keys, each)
		s.fail = oneIn(5, errBoom)
		w := consume(t, f, s, ordered(cfg))
		awaitCount(t, "messages done", keys*each, s.finished)
		w.stop()
		wantRest(t, f, 0)
	}
}

func testOrderCut(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const keys, each = 8, 15
	s := publishKeyed(t, f, keys, each)
	s.fail = oneIn(10, errBoom)
	w := consume(t, f, s, ordered(ConsumerConfig{}))
	for k := range 3 {
		awaitCount(t, "messages done", (k+1)*keys*each/5, s.finished)
		f.Network.CutConnections()
	}
	awaitCount(t, "messages done", keys*each, s.finished)
	w.awaitReady(true)
	w.stop()
	wantRest(t, f, 0)
}

// Consumers take over from one another, and no key regresses.
func testOrderOverConsumers(t *testing.T, f ConsumerFixture) {
	const keys, each, consumers = 12, 20, 4
	s := publishKeyed(t, f, keys, each)
	s.fail = oneIn(10, errBoom)
	var all []*work
	for range consumers {
		all = append(all, launch(t, f, s, ordered(ConsumerConfig{})))
	}
	for k, w := range all[:consumers-1] {
		awaitCount(t, "messages done", (k+1)*keys*each/6, s.finished)
		w.stop() // whoever is at work, in the end the last one is
	}
	awaitCount(t, "messages done", keys*each, s.finished)
	all[consumers-1].stop()
	wantRest(t, f, 0)
}

// A message that is suspected of ending the process runs alone, and its key waits for it.
func testOrderSuspect(t *testing.T, f ConsumerFixture) {
	const keys, each = 3, 10
	s := publishKeyed(t, f, keys, each)
	ledger := memory.NewLedger()
	for id, n := range s.number {
		if n == 0 {
			crashed(t, ledger, &inbox.Message{ID: id, Name: "event"}, 1, 1)
		}
	}
	inVain(t, f, 2*keys)
	w := consume(t, f, remembering{s, ledger}, ordered(ConsumerConfig{}))
	awaitCount(t, "messages done", keys*each, s.finished)
	w.stop()
	wantRest(t, f, 0)
}

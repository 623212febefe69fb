package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

// sequence is a processor that takes the effects of keyed messages and checks their order. A message
// that comes again after its effect changes nothing, as with a processor that remembers.
type sequence struct {
	t      *testing.T
	fail   func(m *inbox.Message) error // nil: no failures
	number map[uuid.UUID]int            // of each message within its key
	keys   map[uuid.UUID]string

	mu      sync.Mutex
	next    map[string]int
	running map[string]int
}

// publishKeyed publishes messages of so many keys, the keys taking turns.
func publishKeyed(t *testing.T, f ConsumerFixture, keys, each int) *sequence {
	t.Helper()
	s := &sequence{t: t, number: map[uuid.UUID]int{}, keys: map[uuid.UUID]string{}, next: map[string]int{}, running: map[string]int{}}
	msgs := make([]*inbox.Message, 0, keys*each)
	for i := range keys * each {
		m := named("event")
		m.Key = fmt.Sprintf("key-%d", i%keys)
		s.number[m.ID], s.keys[m.ID] = i/keys, m.Key
		msgs = append(msgs, m)
	}
	f.Publish(t, msgs...)
	return s
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
	if s.running[key] > 1 {
		s.t.Errorf("two messages of %s are processed at once", key)
	}
}

// skip lets a key go on without the message that is due.
func (s *sequence) skip(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next[key]++
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
		const keys, each = 16, 25
		s := publishKeyed(t, f, keys, each)
		s.fail = oneIn(5, errBoom)
		w := consume(t, f, s, ordered(cfg))
		awaitCount(t, "messages done", keys*each, s.finished)
		w.stop()
		wantRest(t, f, 0)
	}
}

// A failed message holds its key and no other, until it goes through or is a dead letter.
func testOrderHolds(t *testing.T, f ConsumerFixture) {
	const each = 5
	var failing atomic.Bool
	failing.Store(true)
	s := publishKeyed(t, f, 3, each)
	var hopeless uuid.UUID
	for id, n := range s.number {
		if n == 2 {
			hopeless = id // of any key
		}
	}
	s.fail = func(m *inbox.Message) error {
		switch {
		case m.ID == hopeless:
			s.skip(m.Key) // it goes on without this one
			return inbox.Unrecoverable(errBoom)
		case m.Key == "key-0" && failing.Load():
			return inbox.RetryAfter(errBoom, 100*time.Millisecond)
		}
		return nil
	}
	w := consume(t, f, s, ordered(ConsumerConfig{}))
	awaitCount(t, "messages of the other keys", 2*each, s.finished)
	time.Sleep(quiet)
	if n := s.finished(); n != 2*each {
		t.Errorf("%d messages took effect, want %d: the key does not wait", n, 2*each)
	}
	failing.Store(false)
	awaitCount(t, "messages done", 3*each, s.finished)
	if letter := awaitDead(t, f, 1)[0]; letter.Message.ID != hopeless {
		t.Errorf("dead letter %+v", letter)
	}
	w.stop()
	wantRest(t, f, 0)
}

func testOrderOutage(t *testing.T, f ConsumerFixture) {
	const keys, each = 8, 10
	var down atomic.Bool
	down.Store(true)
	s := publishKeyed(t, f, keys, each)
	s.fail = func(*inbox.Message) error {
		if down.Load() {
			return errDown
		}
		return nil
	}
	w := launch(t, f, s, ordered(ConsumerConfig{}))
	time.Sleep(quiet)
	w.awaitReady(false)
	down.Store(false)
	awaitCount(t, "messages done", keys*each, s.finished)
	w.awaitReady(true)
	w.stop()
	wantRest(t, f, 0)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
}

func testOrderCut(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const keys, each = 8, 40
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
	const keys, each, consumers = 16, 50, 4
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

func testOrderKeyFunction(t *testing.T, f ConsumerFixture) {
	const each = 40
	s := publishKeyed(t, f, 2, each)
	var busy atomic.Int64
	s.fail = func(*inbox.Message) error {
		if busy.Add(1) > 1 {
			t.Error("two messages of one key are processed at once")
		}
		time.Sleep(time.Millisecond)
		busy.Add(-1)
		return nil
	}
	cfg := ordered(ConsumerConfig{})
	cfg.Key = func(*inbox.Message) string { return "all" }
	w := consume(t, f, s, cfg)
	awaitCount(t, "messages done", 2*each, s.finished)
	w.stop()
	wantRest(t, f, 0)
}

// What a consumer leaves at its end, the next one takes up in order.
func testOrderOverEnd(t *testing.T, f ConsumerFixture) {
	const keys, each = 6, 30
	s := publishKeyed(t, f, keys, each)
	s.fail = oneIn(4, errBoom)
	for s.finished() < keys*each {
		before := s.finished()
		w := consume(t, f, s, ordered(ConsumerConfig{}))
		awaitCount(t, "messages done", min(before+20, keys*each), s.finished)
		w.stop()
	}
	wantRest(t, f, 0)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("%d dead letters", len(letters))
	}
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

func testOrderHandlerLimit(t *testing.T, f ConsumerFixture) {
	const keys, each = 8, 15
	s := publishKeyed(t, f, keys, each)
	s.fail = oneIn(8, errBoom)
	w := consume(t, f, oneAtATime{s}, ordered(ConsumerConfig{}))
	awaitCount(t, "messages done", keys*each, s.finished)
	w.stop()
	wantRest(t, f, 0)
}

// oneAtATime is a processor whose messages are processed one at a time.
type oneAtATime struct{ *sequence }

func (oneAtATime) Limit(string) int { return 1 }

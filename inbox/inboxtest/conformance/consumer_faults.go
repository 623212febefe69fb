package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

func needsNetwork(t *testing.T, f ConsumerFixture) {
	t.Helper()
	if f.Network == nil {
		t.Skip("there is no network to break")
	}
}

// Connections that are cut while messages are processed and retried cause redeliveries, but lose no message.
func testConsumerCut(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const n, cuts = 60, 3
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		time.Sleep(5 * time.Millisecond)
		if m.Attempt < 2 {
			return errBoom // so that copies are being moved, too
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: 3, Batch: 20, Retry: inbox.RetryPolicy{MaxAttempts: 10, BaseDelay: 50 * time.Millisecond, MaxDelay: 100 * time.Millisecond},
	}})
	for k := range cuts {
		publishMany(t, f, "event", n/cuts)
		awaitCount(t, "deliveries", (k+1)*n/cuts-n/cuts/2, r.count)
		f.Network.CutConnections()
	}
	awaitCount(t, "messages done", n, r.finished)
	w.awaitReady(true)
	w.stop()
	wantRest(t, f, 0)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
}

// A message whose connection is lost while it is processed does not run twice at the same time: the result of
// the run settles the redelivery.
func testConsumerTwin(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	release := make(chan struct{})
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "slow" {
			<-release
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2}})
	slow := publishMany(t, f, "slow", 1)[0]
	awaitCount(t, "messages begun", 1, r.count)
	f.Network.CutConnections()
	publishMany(t, f, "event", 3)
	awaitCount(t, "messages done", 3, r.finished)
	w.awaitReady(true)
	time.Sleep(quiet)
	close(release)
	awaitCount(t, "messages done", 4, r.finished)
	time.Sleep(quiet)
	w.stop()
	if n := len(r.attempts(slow)); n != 1 {
		t.Errorf("the running message ran %d times", n)
	}
	wantRest(t, f, 0)
}

// Run ends within ShutdownTimeout, even if the network is silent.
func testConsumerEndsInSilence(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const limit = 4 * time.Second
	release := make(chan struct{})
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		<-release
		if m.Name == "bad" {
			return errBoom
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: limit}})
	bad := publishMany(t, f, "bad", 1)[0]
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages begun", 2, r.count)
	f.Network.Pause()
	close(release)
	wantEnd(t, w, limit)
	f.Network.Heal()
	again := &runs{}
	consume(t, f, again, ConsumerConfig{})
	await(t, func() error { // the ack of the other message may have arrived
		if len(again.attempts(bad)) == 0 {
			return errors.New("the failed message was not redelivered")
		}
		return nil
	})
}

// switched is a processor that can be paused.
type switched struct {
	*runs
	mu      sync.Mutex
	pause   driver.Pause
	changed chan struct{}
}

var (
	_ inbox.Processor = (*switched)(nil)
	_ driver.Pausable = (*switched)(nil)
)

func (s *switched) Pause(_ context.Context, by, reason string) error {
	s.turn(driver.Pause{By: by, Reason: reason, Since: time.Now()})
	return nil
}

func (s *switched) Resume(context.Context) error {
	s.turn(driver.Pause{})
	return nil
}

func (s *switched) Paused(context.Context) (driver.Pause, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pause, nil
}

func (s *switched) turn(to driver.Pause) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause = to
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *switched) WatchPause(ctx context.Context, tell func(driver.Pause)) {
	for ctx.Err() == nil {
		s.mu.Lock()
		pause, changed := s.pause, s.changed
		s.mu.Unlock()
		tell(pause)
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// pausesLogged counts the pauses by operators that a consumer logs. A pause is logged when nothing starts any
// more.
type pausesLogged struct {
	slog.Handler
	n atomic.Int64
}

func (p *pausesLogged) Enabled(context.Context, slog.Level) bool { return true }

func (p *pausesLogged) WithAttrs([]slog.Attr) slog.Handler { return p }

func (p *pausesLogged) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "paused by an operator" {
		p.n.Add(1)
	}
	return nil
}

func (p *pausesLogged) count() int { return int(p.n.Load()) }

// During a pause no message starts, not even when a consumer starts. Running messages finish, no message
// loses an attempt, and the consumer stays ready.
func testConsumerPaused(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		const n = 20
		cfg := cfg // a copy: other tests run at the same time
		p := &switched{runs: &runs{}, changed: make(chan struct{})}
		p.turn(driver.Pause{By: "ada", Since: time.Now()})
		log, each := &pausesLogged{}, 1
		if f.Parts != nil { // each partition logs it
			each = len(f.Parts(t))
		}
		cfg.Logger = slog.New(log)
		publishMany(t, f, "event", n)
		w := consume(t, f, p, cfg)
		for k := range 3 {
			awaitCount(t, "pauses", (k+1)*each, log.count)
			if k > 0 {
				publishMany(t, f, "event", n)
			}
			time.Sleep(quiet)
			if begun := p.count(); begun != k*n {
				t.Errorf("%d messages started, want %d", begun, k*n)
			}
			w.awaitReady(true)
			if k == 2 {
				break
			}
			p.turn(driver.Pause{})
			awaitCount(t, "messages done", (k+1)*n, p.finished)
			p.turn(driver.Pause{By: "ada", Since: time.Now()})
		}
		w.stop()
		wantRest(t, f, n)
		p.wantFirst(t, anyMessage)
	}
}

// sequence is a processor that records the effects of keyed messages and checks their order. A message
// redelivered after its effect changes nothing, as with a deduplicating processor.
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

// publishKeyed publishes messages of several keys, the keys taking turns.
func publishKeyed(t *testing.T, f ConsumerFixture, keys, each int) *sequence {
	t.Helper()
	s := &sequence{t: t, number: map[uuid.UUID]int{}, next: map[string]int{}, running: map[string]int{}}
	s.publish(f, keys, each)
	return s
}

// publish publishes each more messages of each key.
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

// finished returns how many messages have taken effect.
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

// oneIn fails one of n runs.
func oneIn(n int, err error) func(*inbox.Message) error {
	return func(*inbox.Message) error {
		if rand.IntN(n) == 0 {
			return err
		}
		return nil
	}
}

// Messages of one key are processed one at a time, in order and with their retries; other keys continue.
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

// Consumers take over from each other, and every key stays in order.
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
		w.stop() // the running one ends, except the last
	}
	awaitCount(t, "messages done", keys*each, s.finished)
	all[consumers-1].stop()
	wantRest(t, f, 0)
}

// A message that may have ended the process runs alone, and its key waits for it.
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

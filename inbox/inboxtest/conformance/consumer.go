package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// ConsumerConfig is what the suite sets of a consumer.
type ConsumerConfig struct {
	Concurrency, MaxBodyBytes int // 0 means the consumer's own default
	Retry                     inbox.RetryPolicy
	ShutdownTimeout           time.Duration
}

// ConsumerFixture is one empty queue with its dead letters.
type ConsumerFixture struct {
	// Start runs a consumer of the queue until stop is called, which waits for its end.
	Start func(t *testing.T, p inbox.Processor, cfg ConsumerConfig) (stop func())
	// Publish puts a message into the queue: its ID, Name, Body and ContentType.
	Publish func(t *testing.T, m *inbox.Message)
	// Letters returns the dead letters.
	Letters func(t *testing.T) []inbox.DeadLetter
}

// ConsumerBackend is where TestConsumer runs.
type ConsumerBackend struct {
	// Bubble runs each test in a testing/synctest bubble.
	Bubble bool
	// New returns a fresh fixture.
	New func(t *testing.T) ConsumerFixture
}

// TestConsumer holds a consumer to what every one promises, whatever its broker.
func TestConsumer(t *testing.T, b ConsumerBackend) {
	for name, test := range map[string]func(*testing.T, ConsumerFixture){
		"retries, then a dead letter": testConsumerRetries,
		"refused messages":            testConsumerRefuses,
		"poison like an outage":       testConsumerPoison,
		"an outage costs nothing":     testConsumerOutage,
		"its own end costs nothing":   testConsumerEnd,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if b.Bubble {
				synctest.Test(t, func(t *testing.T) { test(t, b.New(t)) })
				return
			}
			test(t, b.New(t))
		})
	}
}

// soon is a policy of two retries soon after one another.
var soon = inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 50 * time.Millisecond, MaxDelay: 100 * time.Millisecond}

// runs is a Processor that notes what it was given, one message after the other.
type runs struct {
	do func(ctx context.Context, m *inbox.Message) error

	mu   sync.Mutex
	seen map[uuid.UUID][]int // the attempts of each message
	done map[uuid.UUID]bool
}

func (r *runs) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		r.note(m, false)
		if results[i] = r.do(ctx, m); results[i] == nil {
			r.note(m, true)
		}
	}
	return results
}

func (r *runs) note(m *inbox.Message, done bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen == nil {
		r.seen, r.done = map[uuid.UUID][]int{}, map[uuid.UUID]bool{}
	}
	if done {
		r.done[m.ID] = true
		return
	}
	r.seen[m.ID] = append(r.seen[m.ID], max(m.Attempt, 1))
}

func (r *runs) of(id uuid.UUID) []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]int(nil), r.seen[id]...)
}

// finished reports how many messages went through.
func (r *runs) finished() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.done)
}

func (r *runs) begun() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, attempts := range r.seen {
		n += len(attempts)
	}
	return n
}

const patience = 2 * time.Minute

// await polls until check returns nil.
func await(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", patience, err)
		}
	}
}

func awaitCount(t *testing.T, what string, want int, count func() int) {
	t.Helper()
	await(t, func() error {
		if got := count(); got < want {
			return fmt.Errorf("%d of %d %s", got, want, what)
		}
		return nil
	})
}

// named returns a message, whose id is of the bubble's time.
func named(name string) *inbox.Message {
	m := event(1)
	m.ID, m.Name = ids.Deterministic(time.Now(), uuid.NewString()), name
	return m
}

// publishMany publishes n messages of a name and returns their ids.
func publishMany(t *testing.T, f ConsumerFixture, name string, n int) (all []uuid.UUID) {
	t.Helper()
	for range n {
		m := named(name)
		f.Publish(t, m)
		all = append(all, m.ID)
	}
	return all
}

func testConsumerRetries(t *testing.T, f ConsumerFixture) {
	boom := errors.New("boom")
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "always", m.Name == "once" && m.Attempt < 2:
			return boom
		}
		return nil
	}}
	always, once := publishMany(t, f, "always", 1)[0], publishMany(t, f, "once", 1)[0]
	defer f.Start(t, r, ConsumerConfig{Retry: soon})()
	awaitCount(t, "dead letters", 1, func() int { return len(f.Letters(t)) })
	awaitCount(t, "messages done", 1, r.finished)
	letter := f.Letters(t)[0]
	if letter.Message.ID != always || letter.Class != driver.ClassDefault || letter.Attempts != 3 || letter.Error != "boom" {
		t.Errorf("dead letter %+v", letter)
	}
	if a, o := fmt.Sprint(r.of(always)), fmt.Sprint(r.of(once)); a != "[1 2 3]" || o != "[1 2]" {
		t.Errorf("attempts %s and %s", a, o)
	}
}

// What no consumer can give to a handler is a dead letter, and reaches no processor.
func testConsumerRefuses(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(context.Context, *inbox.Message) error { return nil }}
	spoilt := map[string]func(m *inbox.Message){
		"no id":      func(m *inbox.Message) { m.ID = uuid.Nil },
		"an id of 4": func(m *inbox.Message) { m.ID = uuid.New() },
		"no name":    func(m *inbox.Message) { m.Name = "" },
		"too large":  func(m *inbox.Message) { m.Body = []byte(`"` + strings.Repeat("x", 2000) + `"`) },
	}
	for _, spoil := range spoilt {
		m := named("event")
		spoil(m)
		f.Publish(t, m)
	}
	good := publishMany(t, f, "event", 1)[0]
	defer f.Start(t, r, ConsumerConfig{Retry: soon, MaxBodyBytes: 1000})()
	awaitCount(t, "dead letters", len(spoilt), func() int { return len(f.Letters(t)) })
	awaitCount(t, "messages done", 1, r.finished)
	for _, letter := range f.Letters(t) {
		if letter.Class != driver.ClassValidation || letter.Attempts != 1 {
			t.Errorf("dead letter of %d bytes: class %s after %d attempts: %s", len(letter.Message.Body), letter.Class, letter.Attempts, letter.Error)
		}
	}
	if n := r.begun(); n != 1 || len(r.of(good)) != 1 {
		t.Errorf("%d messages reached the processor", n)
	}
}

// A message that always fails for want of a server stops no other, and is given up in the end.
func testConsumerPoison(t *testing.T, f ConsumerFixture) {
	down := inbox.Unavailable(errors.New("down"))
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" {
			return down
		}
		return nil
	}}
	bad := publishMany(t, f, "bad", 2)
	good := publishMany(t, f, "good", 5)
	defer f.Start(t, r, ConsumerConfig{Retry: soon, Concurrency: 2})()
	awaitCount(t, "good messages", len(good), r.finished)
	await(t, func() error { // it is found out by others that go through
		good = append(good, publishMany(t, f, "good", 1)...)
		if n := len(f.Letters(t)); n < len(bad) {
			return fmt.Errorf("%d of %d dead letters", n, len(bad))
		}
		return nil
	})
	for _, letter := range f.Letters(t) {
		if letter.Message.Name != "bad" || letter.Class != driver.ClassDefault || letter.Attempts != 3 {
			t.Errorf("dead letter %s: %s after %d attempts", letter.Message.Name, letter.Class, letter.Attempts)
		}
	}
	awaitCount(t, "good messages", len(good), r.finished)
	for _, id := range good {
		if fmt.Sprint(r.of(id)) != "[1]" {
			t.Errorf("a good message ran as attempts %v", r.of(id))
		}
	}
}

func testConsumerOutage(t *testing.T, f ConsumerFixture) {
	var mu sync.Mutex
	down := true
	r := &runs{do: func(context.Context, *inbox.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if down {
			return inbox.Unavailable(errors.New("down"))
		}
		return nil
	}}
	all := publishMany(t, f, "event", 5)
	defer f.Start(t, r, ConsumerConfig{Retry: soon, Concurrency: 2})()
	awaitCount(t, "failures", 8, r.begun)
	mu.Lock()
	down = false
	mu.Unlock()
	awaitCount(t, "messages done", len(all), r.finished)
	for _, id := range all {
		for _, attempt := range r.of(id) {
			if attempt != 1 {
				t.Errorf("an outage cost an attempt: %v", r.of(id))
			}
		}
	}
	if letters := f.Letters(t); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
}

// What a handler returns when a consumer that ends has cancelled its context counts for nothing.
func testConsumerEnd(t *testing.T, f ConsumerFixture) {
	started := make(chan struct{}, 1)
	r := &runs{do: func(ctx context.Context, _ *inbox.Message) error {
		started <- struct{}{}
		<-ctx.Done()
		return inbox.Unrecoverable(ctx.Err())
	}}
	m := publishMany(t, f, "event", 1)[0]
	stop := f.Start(t, r, ConsumerConfig{Retry: soon, ShutdownTimeout: time.Second})
	<-started
	stop()
	if letters := f.Letters(t); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
	again := &runs{do: func(context.Context, *inbox.Message) error { return nil }}
	defer f.Start(t, again, ConsumerConfig{Retry: soon})()
	awaitCount(t, "messages done", 1, again.finished)
	if got := fmt.Sprint(again.of(m)); got != "[1]" {
		t.Errorf("attempts %s", got)
	}
}

package conformance

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

func testConsumerRetries(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "always" || m.Name == "once" && m.Attempt < 2 {
			return errBoom
		}
		return nil
	}}
	always, once := publishMany(t, f, "always", 1)[0], publishMany(t, f, "once", 1)[0]
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Name: "billing"}})
	letter := awaitDead(t, f, 1)[0]
	awaitCount(t, "messages done", 1, r.finished)
	if letter.Message.ID != always || letter.Class != driver.ClassDefault || letter.Attempts != 3 || letter.Error != "boom" ||
		letter.Consumer != "billing" || !letter.FailedAt.After(letter.FirstFailedAt) {
		t.Errorf("dead letter %+v", letter)
	}
	history := letter.Message.History
	if len(history) != 2 || history[0].Error != "boom" || history[1].Consumer != "billing" || history[1].At.IsZero() || letter.Fingerprint == "" {
		t.Errorf("history %+v, fingerprint %q", history, letter.Fingerprint)
	}
	for _, m := range r.messages() {
		if len(m.History) != m.Attempt-1 {
			t.Errorf("attempt %d has the history %+v", m.Attempt, m.History)
		}
	}
	if a, o := fmt.Sprint(r.attempts(always)), fmt.Sprint(r.attempts(once)); a != "[1 2 3]" || o != "[1 2]" {
		t.Errorf("attempts %s and %s", a, o)
	}
	w.stop()
	wantRest(t, f, 0)
}

// An answer that gives a message back without a drain is no hot loop.
func testConsumerGivenBack(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(context.Context, *inbox.Message) error { return inbox.ErrDraining }}
	w := consume(t, f, r, ConsumerConfig{})
	began := time.Now()
	publishMany(t, f, "event", 1)
	awaitCount(t, "deliveries", 3, r.count)
	if took := time.Since(began); took < time.Second {
		t.Errorf("three deliveries within %v", took)
	}
	r.wantFirst(t, anyMessage)
	w.stop()
}

// What no consumer can give to a handler is a dead letter, and reaches no processor; nor what the mux
// cannot decode a handler.
func testConsumerRefuses(t *testing.T, f ConsumerFixture) {
	mux := inbox.NewMux()
	var good atomic.Int64
	noError(t, inbox.Handle(mux, "event", func(context.Context, Event) error { good.Add(1); return nil }))
	spoilt := []func(m *inbox.Message){
		func(m *inbox.Message) { m.ID = uuid.Nil },
		func(m *inbox.Message) { m.ID = uuid.New() }, // of version 4
		func(m *inbox.Message) { m.Name = "" },
		func(m *inbox.Message) { m.Name = "unknown" },
		func(m *inbox.Message) { m.Body = []byte("{") },
		func(m *inbox.Message) { m.Body = []byte(`"` + strings.Repeat("x", 2000) + `"`) },
	}
	consume(t, f, mux, ConsumerConfig{MaxBodyBytes: 1000})
	for _, spoil := range spoilt {
		m := named("event")
		spoil(m)
		f.Publish(t, m)
		publishMany(t, f, "event", 1)
	}
	for _, letter := range awaitDead(t, f, len(spoilt)) {
		if letter.Class != driver.ClassValidation || letter.Attempts != 1 || letter.Error == "" {
			t.Errorf("dead letter of %d bytes: class %s after %d attempts: %s", len(letter.Message.Body), letter.Class, letter.Attempts, letter.Error)
		}
	}
	awaitCount(t, "good messages", len(spoilt), func() int { return int(good.Load()) })
}

// However many workers have been replaced there are as many as before, and a drain does not wait for
// one whose handler exits meanwhile.
func testConsumerWorkers(t *testing.T, f ConsumerFixture) {
	const workers, gone = 3, 20
	release := make(chan struct{})
	var begun atomic.Int64
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name != "gone" {
			begun.Add(1)
			<-release
		}
		runtime.Goexit()
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: workers, Retry: inbox.RetryPolicy{MaxAttempts: 1}}})
	publishMany(t, f, "gone", gone)
	awaitDead(t, f, gone)
	publishMany(t, f, "event", 2*workers)
	awaitCount(t, "messages begun", workers, func() int { return int(begun.Load()) })
	time.Sleep(quiet)
	w.cancel()
	time.Sleep(quiet)
	close(release)
	w.wait()
	if n := begun.Load(); n != workers {
		t.Errorf("%d messages at once, want %d", n, workers)
	}
	awaitDead(t, f, gone+workers)
	wantRest(t, f, workers)
}

// tidy is a processor with work of its own, which takes a while to end.
type tidy struct {
	*runs
	begun, ended atomic.Int64
}

func (p *tidy) Background(ctx context.Context) {
	p.begun.Add(1)
	<-ctx.Done()
	time.Sleep(quiet)
	p.ended.Add(1)
}

// The processor's own work lasts as long as Run, and Run waits for its end.
func testConsumerBackground(t *testing.T, f ConsumerFixture) {
	p := &tidy{runs: &runs{}}
	w := consume(t, f, p, ConsumerConfig{})
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages done", 1, p.finished)
	if p.begun.Load() != 1 || p.ended.Load() != 0 {
		t.Errorf("begun %d times, ended %d times while Run is at work", p.begun.Load(), p.ended.Load())
	}
	w.stop()
	if p.begun.Load() != 1 || p.ended.Load() != 1 {
		t.Errorf("begun %d times, ended %d times after Run", p.begun.Load(), p.ended.Load())
	}
}

// batches notes the sizes in which messages come, and takes its time.
type batches struct {
	*runs
	mu    sync.Mutex
	sizes []int
}

func (b *batches) Process(ctx context.Context, msgs []*inbox.Message) []error {
	b.mu.Lock()
	b.sizes = append(b.sizes, len(msgs))
	b.mu.Unlock()
	time.Sleep(20 * time.Millisecond)
	return b.runs.Process(ctx, msgs)
}

func (b *batches) largest() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Max(append(b.sizes, 0))
}

// What gathers while the workers are busy comes as a batch; each message ends for itself.
func testConsumerBatch(t *testing.T, f ConsumerFixture) {
	const n, each = 150, 3
	p := &batches{runs: &runs{do: func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "bad" && m.Attempt < 3:
			return errBoom
		case m.Name == "dead":
			return inbox.Unrecoverable(errBoom)
		}
		return nil
	}}}
	var all []*inbox.Message
	for i := range n {
		m := named("event")
		switch i % 50 {
		case 7:
			m.Name = "bad"
		case 8:
			m.Name = "dead"
		case 9:
			m.ID = uuid.Nil
		}
		all = append(all, m)
	}
	f.Publish(t, all...)
	w := consume(t, f, p, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Batch: 25}})
	classes := map[string]int{}
	for _, letter := range awaitDead(t, f, 2*each) {
		classes[letter.Class]++
	}
	if classes[driver.ClassUnrecoverable] != each || classes[driver.ClassValidation] != each {
		t.Errorf("dead letters %v", classes)
	}
	awaitCount(t, "messages done", n-2*each, p.finished)
	w.stop()
	wantRest(t, f, 0)
	if got := p.count(); got != n-each+2*each {
		t.Errorf("%d messages processed", got)
	}
	if largest := p.largest(); largest < 5 || largest > 25 {
		t.Errorf("the largest batch had %d messages", largest)
	}
}

// An operator sees, counts, returns and removes dead letters.
func testConsumerDeadLetters(t *testing.T, f ConsumerFixture) {
	var mended atomic.Bool
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if mended.Load() {
			return nil
		}
		return inbox.Unrecoverable(errors.New("no " + m.Name))
	}}
	w := consume(t, f, r, ConsumerConfig{})
	a, b := publishMany(t, f, "a", 3), publishMany(t, f, "b", 2)
	awaitDead(t, f, 5)
	l := w.DeadLetters()
	if n, err := l.Count(t.Context(), inbox.Filter{Name: "a"}); n != 3 || err != nil {
		t.Errorf("%d dead letters named a, error %v", n, err)
	}
	if found, err := l.List(t.Context(), inbox.Filter{Limit: 4}); len(found) != 4 || err != nil {
		t.Errorf("%d dead letters listed, error %v", len(found), err)
	}
	if d, err := l.Show(t.Context(), b[1]); err != nil || d.Error != "no b" || d.Class != driver.ClassUnrecoverable {
		t.Errorf("%+v, error %v", d, err)
	}
	if _, err := l.Show(t.Context(), ids.New()); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("an unknown id: %v", err)
	}
	if n, err := l.Remove(t.Context(), inbox.Filter{IDs: b[:1]}, inbox.Removal{By: "suite"}); n != 1 || err != nil {
		t.Errorf("removed %d, error %v", n, err)
	}
	if n, err := l.Replay(t.Context(), inbox.Filter{Name: "a"}, inbox.Replay{DryRun: true}); n.Returned != 3 || err != nil {
		t.Errorf("dry run %+v, error %v", n, err)
	}
	mended.Store(true)
	if n, err := l.Replay(t.Context(), inbox.Filter{Name: "a"}, inbox.Replay{By: "suite"}); n != (inbox.Replayed{Returned: 3}) || err != nil {
		t.Errorf("returned %+v, error %v", n, err)
	}
	awaitCount(t, "messages done", 3, r.finished)
	for _, m := range r.messages()[5:] {
		if m.Attempt != 1 || m.Replays != 1 || !slices.Contains(a, m.ID) {
			t.Errorf("returned message %+v", m)
		}
	}
	if left := awaitDead(t, f, 1); left[0].Message.ID != b[1] {
		t.Errorf("left %+v", left)
	}
	w.stop()
	wantRest(t, f, 0)
}

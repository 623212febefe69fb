package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

// What a handler returns when a consumer that ends has cancelled its context counts for nothing.
func testConsumerEnd(t *testing.T, f ConsumerFixture) {
	started := make(chan struct{}, 1)
	ended := make(chan error, 1)
	r := &runs{do: func(ctx context.Context, _ *inbox.Message) error {
		started <- struct{}{}
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return inbox.Unrecoverable(ctx.Err())
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: 3 * time.Second}})
	m := publishMany(t, f, "event", 1)[0]
	<-started
	w.stop()
	awaitCount(t, "handlers that noticed it", 1, func() int { return len(ended) }) // a busy machine may leave one behind
	if err := <-ended; !errors.Is(err, inbox.ErrDraining) {
		t.Errorf("the context ended with %v", err)
	}
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
	again := &runs{}
	consume(t, f, again, ConsumerConfig{})
	awaitCount(t, "messages done", 1, again.finished)
	if got := fmt.Sprint(again.attempts(m)); got != "[1]" {
		t.Errorf("attempts %s", got)
	}
}

// A drain finishes what runs, gives back at once what waits, and counts nothing.
func testConsumerDrain(t *testing.T, f ConsumerFixture) {
	release := make(chan struct{})
	r := &runs{do: func(context.Context, *inbox.Message) error { <-release; return nil }}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Prefetch: 6}})
	publishMany(t, f, "event", 8)
	awaitCount(t, "messages begun", 2, r.count)
	w.cancel()
	left := &runs{}
	other := consume(t, f, left, ConsumerConfig{})
	awaitCount(t, "messages given back", 6, left.finished)
	if err := w.Ready(t.Context()); err == nil {
		t.Error("ready while draining")
	}
	close(release)
	w.wait()
	other.stop()
	left.wantFirst(t, anyMessage)
	if r.finished() != 2 || left.finished() != 6 {
		t.Errorf("%d and %d messages done", r.finished(), left.finished())
	}
	wantRest(t, f, 0)
}

// meetingLedger notes ends of runs only when there are as many at once.
type meetingLedger struct {
	driver.Ledger
	missing, timedOut atomic.Int64
	all               chan struct{}
}

func (l *meetingLedger) End(ctx context.Context, m *inbox.Message) error {
	if l.missing.Add(-1) == 0 {
		close(l.all)
	}
	select {
	case <-l.all:
		return l.Ledger.End(ctx, m)
	case <-ctx.Done():
		l.timedOut.Add(1)
		return ctx.Err()
	}
}

// Handlers that ignore the end of their context are left behind: their messages go back uncounted,
// and a ledger that hangs delays the end by one call, not by one for each.
func testConsumerLeavesBehind(t *testing.T, f ConsumerFixture) {
	const n = 3
	ledger := &meetingLedger{Ledger: memory.NewLedger(), all: make(chan struct{})}
	ledger.missing.Store(n)
	release := make(chan struct{})
	defer close(release)
	r := &runs{do: func(context.Context, *inbox.Message) error { <-release; return errBoom }}
	failedOnce(t, f, named("a"), named("b"), named("c"))
	const limit = 20 * time.Second // a tenth of it is for the notes, on a busy machine too
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: n, HandlerTimeout: 20 * time.Millisecond, ShutdownTimeout: limit,
	}})
	awaitCount(t, "messages begun", n, r.count)
	wantEnd(t, w, limit)
	if m, late := ledger.missing.Load(), ledger.timedOut.Load(); m != 0 || late != 0 {
		t.Errorf("%d runs were not noted as survived, %d not beside the others", m, late)
	}
	left := rest(t, f, n)
	for _, m := range left {
		if m.Attempt != 2 {
			t.Errorf("a message was counted: %+v", m)
		}
	}
	if len(left) != n {
		t.Errorf("%d messages are left, want %d", len(left), n)
	}
}

// wantEnd stops a consumer, which must end within its limit.
func wantEnd(t *testing.T, w *work, limit time.Duration) {
	t.Helper()
	began := time.Now()
	w.stop()
	if took := time.Since(began); took > limit+10*time.Second {
		t.Errorf("Run took %v to end, the limit is %v", took, limit)
	}
}

// hangingLedger answers nothing.
type hangingLedger struct {
	driver.Ledger
	wait func()
}

func (l hangingLedger) Look(context.Context, uuid.UUID) (driver.LedgerEntry, error) {
	l.wait()
	return driver.LedgerEntry{}, errBoom
}

// What the caller gave may ignore its context: Run ends all the same.
func testConsumerOthersHang(t *testing.T, f ConsumerFixture) {
	const limit = 3 * time.Second
	hang := make(chan struct{})
	defer close(hang)
	var hung atomic.Int64
	wait := func() {
		hung.Add(1)
		<-hang
	}
	failedOnce(t, f, named("event"))
	w := consume(t, f, remembering{&runs{}, hangingLedger{wait: wait}}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: limit}})
	awaitCount(t, "calls of the ledger", 1, func() int { return int(hung.Load()) })
	wantEnd(t, w, limit)

	anonymous := named("event")
	anonymous.ID = uuid.Nil
	f.Publish(t, anonymous)
	w = launch(t, f, &runs{}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{
		ShutdownTimeout: limit, DeriveID: func(*inbox.Message) uuid.UUID { wait(); return uuid.Nil },
	}})
	awaitCount(t, "calls of DeriveID", 2, func() int { return int(hung.Load()) })
	wantEnd(t, w, limit)
}

// A context that cannot end is not taken for one that has.
func testConsumerOnBackground(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Attempt == 1 {
			return errBoom // so that a copy is made, too
		}
		return nil
	}}
	c := f.Consumer(t, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Retry: soon, MessageLimit: 2}})
	over := make(chan error, 1)
	go func() { over <- c.Run(context.Background()) }()
	publishMany(t, f, "event", 1)
	if err := <-over; err != nil {
		t.Error(err)
	}
	if seen := r.messages(); len(seen) != 2 || seen[1].Attempt != 2 {
		t.Errorf("deliveries %+v", seen)
	}
}

func testConsumerRunsOnce(t *testing.T, f ConsumerFixture) {
	w := consume(t, f, &runs{}, ConsumerConfig{})
	if err := w.Run(t.Context()); err == nil {
		t.Error("a second Run was accepted")
	}
	w.awaitReady(true)
	w.stop()
	if err := w.Ready(t.Context()); err == nil {
		t.Error("ready after Run")
	}
}

func testConsumerMessageLimit(t *testing.T, f ConsumerFixture) {
	r := &runs{}
	publishMany(t, f, "event", 5)
	launch(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 3}}).wait()
	if n := r.count(); n != 3 {
		t.Errorf("%d messages processed", n)
	}
	wantRest(t, f, 2)
}

func testConsumerBatchLimit(t *testing.T, f ConsumerFixture) {
	p := &batches{runs: &runs{}}
	publishMany(t, f, "event", 60)
	launch(t, f, p, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Batch: 10, MessageLimit: 37}}).wait()
	if n := p.count(); n != 37 {
		t.Errorf("%d messages processed", n)
	}
	wantRest(t, f, 23)
}

// Passing through a long delay is no message of the limit's.
func testConsumerLimitWithDelays(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "slow" && m.Attempt == 1 {
			return inbox.RetryAfter(errBoom, 1200*time.Millisecond)
		}
		return nil
	}}
	publishMany(t, f, "slow", 1)
	publishMany(t, f, "event", 1)
	launch(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 3}}).wait()
	seen := r.messages()
	if len(seen) != 3 || seen[2].Name != "slow" || seen[2].Attempt != 2 || seen[2].Recovered != 1 {
		t.Errorf("messages %+v", seen)
	}
}

func testConsumerTimeLimit(t *testing.T, f ConsumerFixture) {
	began := time.Now()
	launch(t, f, &runs{}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{TimeLimit: 300 * time.Millisecond}}).wait()
	if took := time.Since(began); took < 300*time.Millisecond || took > 30*time.Second {
		t.Errorf("Run ended after %v", took)
	}
}

func testConsumerMemoryLimit(t *testing.T, f ConsumerFixture) {
	r := &runs{}
	publishMany(t, f, "event", 5)
	launch(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{MemoryLimit: 1}}).wait()
	wantRest(t, f, 5-r.finished())
}

// Two consumers share a queue; what one leaves when it ends is for the other.
func testConsumerShares(t *testing.T, f ConsumerFixture) {
	const n = 40
	slow := func(context.Context, *inbox.Message) error { time.Sleep(50 * time.Millisecond); return nil }
	one, other := &runs{do: slow}, &runs{do: slow}
	cfg := ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Prefetch: 2}}
	w, v := consume(t, f, one, cfg), consume(t, f, other, cfg)
	publishMany(t, f, "event", n)
	awaitCount(t, "messages of the first", 3, one.finished)
	awaitCount(t, "messages of the second", 3, other.finished)
	w.stop()
	awaitCount(t, "messages done", n, func() int { return one.finished() + other.finished() })
	v.stop()
	if total := one.count() + other.count(); total != n {
		t.Errorf("%d deliveries of %d messages", total, n)
	}
	wantRest(t, f, 0)
}

package conformance

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

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
	const limit = 20 * time.Second // a tenth of it is for the notes
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
	if took := time.Since(began); took > limit+time.Second {
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
	noError(t, <-over)
	if seen := r.messages(); len(seen) != 2 || seen[1].Attempt != 2 {
		t.Errorf("deliveries %+v", seen)
	}
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

// Two consumers share a queue; what one leaves when it ends is for the other.
func testConsumerShares(t *testing.T, f ConsumerFixture) {
	const n = 30
	slow := func(context.Context, *inbox.Message) error { time.Sleep(20 * time.Millisecond); return nil }
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

// crashed notes runs of a message that did not end.
func crashed(t *testing.T, l driver.Ledger, m *inbox.Message, attempt, times int) {
	t.Helper()
	noted := *m
	noted.Attempt = attempt
	for range times {
		noError(t, l.Start(t.Context(), &noted))
	}
}

func entry(t *testing.T, l driver.Ledger, id uuid.UUID) driver.LedgerEntry {
	t.Helper()
	e, err := l.Look(t.Context(), id)
	noError(t, err)
	return e
}

// Each counted failure is noted, so that what comes again of the attempt is known as its leftover.
func testConsumerNotesRetries(t *testing.T, f ConsumerFixture) {
	ledger := memory.NewLedger()
	release := make(chan struct{})
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "dead" && m.Attempt == 2:
			return inbox.Unrecoverable(errBoom)
		case m.Name == "waiting":
			return inbox.RetryAfter(errBoom, time.Hour)
		case m.Name == "postponed":
			return inbox.Postpone(errBoom, time.Hour)
		case m.Attempt < 3:
			return errBoom
		}
		<-release
		return nil
	}}
	consume(t, f, remembering{r, ledger}, ConsumerConfig{})
	retried, hopeless := publishMany(t, f, "retried", 1)[0], publishMany(t, f, "dead", 1)[0]
	waiting, postponed := publishMany(t, f, "waiting", 1)[0], publishMany(t, f, "postponed", 1)[0]
	awaitDead(t, f, 1)
	await(t, func() error {
		if e := entry(t, ledger, waiting); e.Attempt != 2 || e.Open != 0 {
			return fmt.Errorf("while the second attempt waits: %+v", e)
		}
		return nil
	})
	if e := entry(t, ledger, postponed); e != (driver.LedgerEntry{}) {
		t.Errorf("of a postponed message: %+v", e)
	}
	await(t, func() error {
		if e := entry(t, ledger, retried); e.Attempt != 3 || e.Open != 1 {
			return fmt.Errorf("while the third attempt runs: %+v", e)
		}
		return nil
	})
	close(release)
	await(t, func() error {
		if e := entry(t, ledger, retried); e != (driver.LedgerEntry{}) {
			return fmt.Errorf("of a processed message: %+v", e)
		}
		if e := entry(t, ledger, hopeless); e.Open != 0 || e.Attempt > 3 {
			return fmt.Errorf("of a dead letter: %+v", e)
		}
		return nil
	})
}

// Copies that are in progress elsewhere are open runs as well: what comes for the first time has
// ended no process.
func testConsumerOtherCopies(t *testing.T, f ConsumerFixture) {
	ledger := memory.NewLedger()
	m := named("event")
	crashed(t, ledger, m, 2, 3)
	failedOnce(t, f, m)
	r := &runs{}
	consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{MaxCrashes: 3}})
	awaitCount(t, "messages done", 1, r.finished)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
}

type brokenLedger struct {
	driver.Ledger
	broken atomic.Bool
}

func (l *brokenLedger) Look(ctx context.Context, id uuid.UUID) (driver.LedgerEntry, error) {
	if l.broken.Load() {
		return driver.LedgerEntry{}, errBoom
	}
	return l.Ledger.Look(ctx, id)
}

// While the ledger cannot be asked, what needs it waits, uncounted.
func testConsumerLedgerDown(t *testing.T, f ConsumerFixture) {
	ledger := &brokenLedger{Ledger: memory.NewLedger()}
	ledger.broken.Store(true)
	r := &runs{}
	failedOnce(t, f, named("event"))
	w := launch(t, f, remembering{r, ledger}, ConsumerConfig{})
	time.Sleep(quiet)
	w.awaitReady(false)
	ledger.broken.Store(false)
	awaitCount(t, "messages done", 1, r.finished)
	if m := r.messages()[0]; m.Attempt != 2 {
		t.Errorf("attempt %d", m.Attempt)
	}
	w.awaitReady(true)
}

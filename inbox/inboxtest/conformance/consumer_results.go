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
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
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

// A result that requeues a message without a drain causes no hot loop.
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

// A message that no handler can get becomes a dead letter and reaches no processor; a message that the mux
// cannot decode reaches no handler.
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

// After workers were replaced, there are as many as before. A drain does not wait for a worker whose handler
// exits meanwhile.
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

// tidy is a processor with background work that takes a while to end.
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

// The processor's background work lasts as long as Run, and Run waits for its end.
func testConsumerBackground(t *testing.T, f ConsumerFixture) {
	p := &tidy{runs: &runs{}}
	w := consume(t, f, p, ConsumerConfig{})
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages done", 1, p.finished)
	if p.begun.Load() != 1 || p.ended.Load() != 0 {
		t.Errorf("started %d times, ended %d times while Run works", p.begun.Load(), p.ended.Load())
	}
	w.stop()
	if p.begun.Load() != 1 || p.ended.Load() != 1 {
		t.Errorf("started %d times, ended %d times after Run", p.begun.Load(), p.ended.Load())
	}
}

// batches records the sizes of its batches, and takes a while for each.
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

// Messages that arrive while the workers are busy form a batch; each message has its own result.
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

// An operator lists, counts, returns and removes dead letters.
func testConsumerDeadLetters(t *testing.T, f ConsumerFixture) {
	var fixed atomic.Bool
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if fixed.Load() {
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
	fixed.Store(true)
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

// A drain finishes running messages, requeues waiting ones at once, and counts nothing.
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

// A consumer lists the messages in its handlers while they run, also during a drain, and none before and afterwards.
func testConsumerRunning(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		const n = 3
		release := make(chan struct{})
		r := &runs{do: func(context.Context, *inbox.Message) error { <-release; return nil }}
		cfg.Concurrency, cfg.HandlerTimeout = n, time.Minute
		w := consume(t, f, r, cfg)
		if all := w.Running(); len(all) != 0 {
			t.Errorf("%d messages in work before the first", len(all))
		}
		sent := map[uuid.UUID]*inbox.Message{}
		for i := range n {
			m := named("event")
			m.Key = fmt.Sprint("key-", i)
			sent[m.ID] = m
			f.Publish(t, m)
		}
		awaitCount(t, "messages begun", n, r.count)
		w.cancel()
		all := w.Running()
		if len(all) != n || !slices.IsSortedFunc(all, func(a, b driver.Running) int { return a.Since.Compare(b.Since) }) {
			t.Errorf("%d messages in work, or not the oldest first: %+v", len(all), all)
		}
		for _, running := range all {
			m := sent[running.ID]
			if m == nil || running.Name != m.Name || running.Key != m.Key || running.Attempt != 1 || running.Consumer == "" {
				t.Errorf("in work: %+v", running)
			}
			if limit := running.Until.Sub(running.Since); limit != time.Minute {
				t.Errorf("its handler has %v", limit)
			}
		}
		close(release)
		w.wait()
		if all := w.Running(); len(all) != 0 {
			t.Errorf("%d messages in work after the end", len(all))
		}
	}
}

// meetingLedger records ends of runs only if all of them are recorded at the same time.
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

// Handlers that ignore cancellation are abandoned: their messages are requeued uncounted. A ledger that hangs
// delays the end by one call, not by one for each message.
func testConsumerLeavesBehind(t *testing.T, f ConsumerFixture) {
	const n = 3
	ledger := &meetingLedger{Ledger: memory.NewLedger(), all: make(chan struct{})}
	ledger.missing.Store(n)
	release := make(chan struct{})
	defer close(release)
	r := &runs{do: func(context.Context, *inbox.Message) error { <-release; return errBoom }}
	failedOnce(t, f, named("a"), named("b"), named("c"))
	const limit = 20 * time.Second // a tenth of it is for the ledger
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: n, HandlerTimeout: 20 * time.Millisecond, ShutdownTimeout: limit,
	}})
	awaitCount(t, "messages begun", n, r.count)
	wantEnd(t, w, limit)
	if m, late := ledger.missing.Load(), ledger.timedOut.Load(); m != 0 || late != 0 {
		t.Errorf("%d runs were not recorded as survived, %d not together with the others", m, late)
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

// hangingLedger never returns before its context ends.
type hangingLedger struct {
	driver.Ledger
	wait func()
}

func (l hangingLedger) Look(context.Context, uuid.UUID) (driver.LedgerEntry, error) {
	l.wait()
	return driver.LedgerEntry{}, errBoom
}

// If the caller's processor, ledger or hooks ignore their context, Run still ends.
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

// A context that cannot end does not count as ended.
func testConsumerOnBackground(t *testing.T, f ConsumerFixture) {
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Attempt == 1 {
			return errBoom // so that a copy is moved, too
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

// Messages that only pass through steps of a long delay do not count towards the limit.
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

// Two consumers share a queue; messages left by one that ends go to the other.
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

// crashed records runs of a message that did not end.
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

// Each counted failure is recorded, so that an extra copy of the attempt can be detected.
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

// Copies in progress elsewhere are open runs, too: a first delivery has ended no process.
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

// While the ledger is unreachable, messages that need it wait, uncounted.
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

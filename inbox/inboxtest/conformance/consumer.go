package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// Consumer has the methods of a consumer that the suite calls.
type Consumer interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	DeadLetters() inbox.DeadLetters
	Running() []driver.Running
}

// ConsumerConfig is the part of a consumer's config that the suite sets.
type ConsumerConfig struct {
	inbox.ConsumerConfig
	// MaxBodyBytes is the largest body that is processed. 0 means the consumer's own default.
	MaxBodyBytes int
}

// ConsumerFixture is one empty queue with its sources and its consumers.
type ConsumerFixture struct {
	SourceFixture
	// Parts returns the sources of all partitions. A queue of several partitions has it in place of New.
	Parts func(t *testing.T) []driver.Source
	// Consumer returns a consumer of the queue, set up. It is Ordered only if the sources are exclusive.
	Consumer func(t *testing.T, p inbox.Processor, cfg ConsumerConfig) Consumer
}

// ConsumerBackend configures TestConsumer.
type ConsumerBackend struct {
	Runs
	// Ordered means that the fixtures' sources are exclusive: only the tests of order run.
	Ordered bool
	// New returns a fresh fixture.
	New func(t *testing.T) ConsumerFixture
}

// TestConsumer tests the parts of a consumer's contract that depend on its source. Package engine tests the
// others.
func TestConsumer(t *testing.T, b ConsumerBackend) {
	tests := consumerTests
	if b.Ordered {
		tests = orderTests
	}
	runAll(t, b.Runs, b.New, tests)
}

var consumerTests = map[string]subtest[ConsumerFixture]{
	"retries, then a dead letter":     {once, testConsumerRetries},
	"rejected messages":               {once, testConsumerRefuses},
	"batches":                         {once, testConsumerBatch},
	"dead letters by an operator":     {once, testConsumerDeadLetters},
	"limit of messages, batches":      {once, testConsumerBatchLimit},
	"limit of messages, delays":       {once, testConsumerLimitWithDelays},
	"drain":                           {once, testConsumerDrain},
	"messages in work":                {once, testConsumerRunning(ConsumerConfig{})},
	"consumers share a queue":         {once, testConsumerShares},
	"connections are cut":             {once, testConsumerCut},
	"cut off while it runs":           {once, testConsumerTwin},
	"requeued without a reason":       {fakes, testConsumerGivenBack},
	"workers stay as many":            {fakes, testConsumerWorkers},
	"processor's own work":            {fakes, testConsumerBackground},
	"drain abandons handlers":         {fakes, testConsumerLeavesBehind},
	"drain ends although others hang": {fakes, testConsumerOthersHang},
	"context without an end":          {fakes, testConsumerOnBackground},
	"retries are recorded":            {fakes, testConsumerNotesRetries},
	"open runs of other copies":       {fakes, testConsumerOtherCopies},
	"no answer from the ledger":       {fakes, testConsumerLedgerDown},
	"end while the network is silent": {fakes, testConsumerEndsInSilence},
	"paused by an operator":           {fakes, testConsumerPaused(ConsumerConfig{})},
}

var orderTests = map[string]subtest[ConsumerFixture]{
	"one key in order":                {once, testOrderOfKeys(ConsumerConfig{})},
	"messages in work":                {fakes, testConsumerRunning(ordered(ConsumerConfig{}))},
	"one key in order, batches":       {fakes, testOrderOfKeys(ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Batch: 10}})},
	"order when connections are cut":  {once, testOrderCut},
	"order over several consumers":    {always, testOrderOverConsumers},
	"a crash suspect keeps the order": {fakes, testOrderSuspect},
	"paused by an operator":           {fakes, testConsumerPaused(ordered(ConsumerConfig{}))},
}

// soon is a policy of two retries in quick succession.
var soon = inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 50 * time.Millisecond, MaxDelay: 100 * time.Millisecond}

var errBoom = errors.New("boom")

// runs is a Processor that records its messages, one after the other.
type runs struct {
	do func(ctx context.Context, m *inbox.Message) error // nil: nothing

	mu    sync.Mutex
	begun []inbox.Message
	done  map[uuid.UUID]bool
}

func (r *runs) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		r.note(m, false)
		if r.do != nil {
			results[i] = r.do(ctx, m)
		}
		if results[i] == nil {
			r.note(m, true)
		}
	}
	return results
}

func (r *runs) note(m *inbox.Message, done bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !done {
		r.begun = append(r.begun, *m)
		return
	}
	if r.done == nil {
		r.done = map[uuid.UUID]bool{}
	}
	r.done[m.ID] = true
}

// messages returns all started messages, in that order.
func (r *runs) messages() []inbox.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.begun)
}

// attempts returns the started attempts of a message.
func (r *runs) attempts(id uuid.UUID) (all []int) {
	for _, m := range r.messages() {
		if m.ID == id {
			all = append(all, m.Attempt)
		}
	}
	return all
}

func (r *runs) count() int { return len(r.messages()) }

// finished returns how many messages succeeded.
func (r *runs) finished() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.done)
}

// wantFirst fails the test for each message that started with a later attempt than its first.
func (r *runs) wantFirst(t *testing.T, of func(inbox.Message) bool) {
	t.Helper()
	for _, m := range r.messages() {
		if of(m) && m.Attempt != 1 {
			t.Errorf("%s started with attempt %d", m.Name, m.Attempt)
		}
	}
}

func anyMessage(inbox.Message) bool { return true }

// remembering is a processor with a ledger.
type remembering struct {
	inbox.Processor
	ledger driver.Ledger
}

func (r remembering) Ledger() driver.Ledger { return r.ledger }

func (r remembering) Retention() time.Duration { return driver.DefaultRetention }

// work is a running consumer.
type work struct {
	Consumer
	t      *testing.T
	cancel context.CancelFunc
	ended  chan struct{}
	once   sync.Once
	err    error
}

// consume starts a consumer and waits until it is ready.
func consume(t *testing.T, f ConsumerFixture, p inbox.Processor, cfg ConsumerConfig) *work {
	t.Helper()
	w := launch(t, f, p, cfg)
	await(t, func() error { return w.Ready(t.Context()) })
	return w
}

// launch starts a consumer, after the calls to make between its setup and its start. It ends with the test at
// the latest.
func launch(t *testing.T, f ConsumerFixture, p inbox.Processor, cfg ConsumerConfig, before ...func()) *work {
	t.Helper()
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	if cfg.Retry == (inbox.RetryPolicy{}) {
		cfg.Retry = soon
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	w := &work{Consumer: f.Consumer(t, p, cfg), t: t, cancel: cancel, ended: make(chan struct{})}
	for _, do := range before {
		do()
	}
	go func() {
		defer close(w.ended)
		w.err = w.Run(ctx)
	}()
	t.Cleanup(w.stop)
	return w
}

// stop ends Run and waits for it.
func (w *work) stop() {
	w.t.Helper()
	w.cancel()
	w.wait()
}

// wait returns when Run has ended.
func (w *work) wait() {
	w.t.Helper()
	select {
	case <-w.ended:
	case <-time.After(patience):
		w.t.Error("Run does not end")
		return
	}
	w.once.Do(func() {
		if w.err != nil {
			w.t.Errorf("Run: %v", w.err)
		}
	})
}

// awaitReady waits until Ready has the wanted result.
func (w *work) awaitReady(want bool) {
	w.t.Helper()
	await(w.t, func() error {
		if err := w.Ready(w.t.Context()); (err == nil) != want {
			return fmt.Errorf("ready: %w", cmp.Or(err, errors.New("yes")))
		}
		return nil
	})
}

// sessions opens a session of the queue, or of each partition.
func sessions(t *testing.T, f ConsumerFixture, window int) (all []driver.Session) {
	t.Helper()
	if f.Parts == nil {
		return []driver.Session{begin(t, running(t, f.SourceFixture), window)}
	}
	for _, source := range f.Parts(t) {
		all = append(all, begin(t, run(t, source), window))
	}
	return all
}

// come returns the deliveries of a session within a time.
func come(t *testing.T, s driver.Session, most int, within time.Duration) []driver.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within) // timing: it must pass once nothing is left
	defer cancel()
	ds, err := s.Receive(ctx, most)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	noError(t, err)
	return ds
}

// rest receives the messages left in the queue, which no consumer reads any more: at least least, some of
// which may be late.
func rest(t *testing.T, f ConsumerFixture, least int) (left []inbox.Message) {
	t.Helper()
	all := sessions(t, f, 100)
	deadline := time.Now().Add(patience)
	for more := true; more || len(left) < least && time.Now().Before(deadline); {
		more = false
		for _, s := range all {
			ds := come(t, s, 100, 2*quiet)
			for _, d := range ds {
				left = append(left, *d.Message())
			}
			acked(t, s, ds...)
			more = more || len(ds) > 0
		}
	}
	return left
}

// wantRest ends the consumer's test: want messages are left in the queue. A forgetful queue may have others
// again, each once: a second copy was never settled.
func wantRest(t *testing.T, f ConsumerFixture, want int) {
	t.Helper()
	left := rest(t, f, want)
	if len(left) < want || len(left) > want && !f.Forgetful {
		t.Errorf("%d messages are left in the queue, want %d", len(left), want)
	}
	there := map[uuid.UUID]bool{}
	for _, m := range left {
		if there[m.ID] {
			t.Errorf("message %s is left twice", m.ID)
		}
		there[m.ID] = true
	}
}

// inVain delivers the first messages of the queue, or of each partition, to a session that settles none.
func inVain(t *testing.T, f ConsumerFixture, n int) {
	t.Helper()
	got := 0
	for deadline := time.Now().Add(patience); got < n && time.Now().Before(deadline); {
		for _, s := range sessions(t, f, n) {
			got += len(come(t, s, n, 2*quiet))
			noError(t, s.Close(t.Context()))
		}
	}
}

// failedOnce publishes messages and moves them to their second attempts.
func failedOnce(t *testing.T, f ConsumerFixture, msgs ...*inbox.Message) {
	t.Helper()
	f.Publish(t, msgs...)
	source := running(t, f.SourceFixture)
	s := begin(t, source, len(msgs))
	next := driver.Progress{Attempt: 2, FirstFailedAt: time.Now()}
	all := take(t, s, len(msgs))                // all at once: a retry may arrive before new messages
	if err := s.Stop(t.Context()); err != nil { // otherwise a retry arrives here, and is requeued as redelivered
		t.Fatal(err)
	}
	for _, d := range all {
		moved(t, source, s, later(d, 0, next))
	}
	if f.Forgetful {
		time.Sleep(quiet)
	}
	ended(t, s)
}

// dead returns the dead letters of all classes.
func dead(t *testing.T, f ConsumerFixture) (all []inbox.DeadLetter) {
	t.Helper()
	depths, err := f.DeadLetters(t).Depths(t.Context())
	noError(t, err)
	for _, depth := range depths {
		all = append(all, scan(t, f.SourceFixture, depth.Class)...)
	}
	return all
}

func awaitDead(t *testing.T, f ConsumerFixture, want int) []inbox.DeadLetter {
	t.Helper()
	var all []inbox.DeadLetter
	await(t, func() error {
		if all = dead(t, f); len(all) < want {
			return fmt.Errorf("%d of %d dead letters", len(all), want)
		}
		return nil
	})
	if len(all) > want {
		t.Errorf("%d dead letters, want %d", len(all), want)
	}
	return all
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

// named returns a message with an id of the bubble's time.
func named(name string) *inbox.Message {
	m := event(1)
	m.ID, m.Name = ids.Deterministic(time.Now(), uuid.NewString()), name
	return m
}

// publishMany publishes n messages of a name and returns their ids.
func publishMany(t *testing.T, f ConsumerFixture, name string, n int) (all []uuid.UUID) {
	t.Helper()
	msgs := make([]*inbox.Message, n)
	for i := range msgs {
		msgs[i] = named(name)
		all = append(all, msgs[i].ID)
	}
	f.Publish(t, msgs...)
	return all
}

package conformance

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// Name is the message name for which a Fixture's processors have their handler.
const Name = "conformance.event"

// Event is the body of the suite's messages.
type Event struct {
	Number int `json:"number"`
}

// Handler is run for a message of the suite. Its error is the handler's error.
type Handler func(ctx context.Context, e Event) error

// Fixture is one empty store of entries with its processors.
type Fixture struct {
	// Processor returns a processor for a consumer. For each message named Name that it does not skip, it
	// runs the handler. If the handler returns nil, it takes the effect: it counts one for the consumer and
	// the event's number. It protects effects in its usual way, such as in the handler's transaction.
	Processor func(t *testing.T, consumer string, h Handler) inbox.Processor
	// Effects returns how often the effect was durably taken.
	Effects func(t *testing.T, consumer string, number int) int
}

// Backend configures TestProcessor.
type Backend struct {
	// Bubble runs each test in a testing/synctest bubble.
	Bubble bool
	// New returns a fresh fixture.
	New func(t *testing.T) Fixture
}

// TestProcessor tests the contract of an inbox.Processor with deduplication.
func TestProcessor(t *testing.T, b Backend) {
	for name, test := range map[string]func(*testing.T, Fixture){
		"done":                  testDone,
		"duplicate is skipped":  testDuplicate,
		"failure allows retry":  testRetry,
		"markers are kept":      testMarkers,
		"consumers are apart":   testConsumers,
		"concurrent duplicates": testConcurrentDuplicates,
		"rejected messages":     testRefused,
		"encodings":             testEncodings,
		"panic":                 testPanic,
		"message in context":    testMessageInContext,
		"several messages":      testSeveral,
		"draining":              testDraining,
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

func event(number int) *inbox.Message {
	return &inbox.Message{
		ID: ids.New(), Name: Name, Body: fmt.Appendf(nil, `{"number":%d}`, number), ContentType: "application/json", Attempt: 1,
	}
}

func succeed(context.Context, Event) error { return nil }

// process processes one message.
func process(ctx context.Context, t *testing.T, p inbox.Processor, m *inbox.Message) error {
	t.Helper()
	results := p.Process(ctx, []*inbox.Message{m})
	if len(results) != 1 {
		t.Fatalf("%d results for one message", len(results))
	}
	return results[0]
}

func mustProcess(t *testing.T, p inbox.Processor, m *inbox.Message) {
	t.Helper()
	if err := process(t.Context(), t, p, m); err != nil {
		t.Fatalf("Process: %v", err)
	}
}

func wantEffects(t *testing.T, f Fixture, consumer string, number, want int) {
	t.Helper()
	if got := f.Effects(t, consumer, number); got != want {
		t.Errorf("effect of event %d was taken %d times by %s, want %d", number, got, consumer, want)
	}
}

func testRefused(t *testing.T, f Fixture) {
	runs := 0
	p := f.Processor(t, "a", func(context.Context, Event) error { runs++; return nil })
	change := func(with func(*inbox.Message)) *inbox.Message {
		m := event(1)
		with(m)
		return m
	}
	for name, m := range map[string]*inbox.Message{
		"no id":              change(func(m *inbox.Message) { m.ID = uuid.Nil }),
		"id of version 4":    change(func(m *inbox.Message) { m.ID = uuid.New() }),
		"no name":            change(func(m *inbox.Message) { m.Name = "" }),
		"unknown name":       change(func(m *inbox.Message) { m.Name = "conformance.unknown" }),
		"long name":          change(func(m *inbox.Message) { m.Name = strings.Repeat("n", 1000) }),
		"no body":            change(func(m *inbox.Message) { m.Body = nil }),
		"malformed body":     change(func(m *inbox.Message) { m.Body = []byte(`{"number":`) }),
		"body of wrong type": change(func(m *inbox.Message) { m.Body = []byte(`{"number":"x"}`) }),
		"not JSON":           change(func(m *inbox.Message) { m.ContentType = "text/plain" }),
	} {
		for range 2 { // nothing is recorded: the second time is not a duplicate
			failure := driver.Classify(process(t.Context(), t, p, m))
			if failure.Action != driver.ActionDead || failure.Class != driver.ClassValidation {
				t.Errorf("%s: %+v", name, failure)
			}
		}
	}
	if runs != 0 {
		t.Errorf("the handler ran %d times", runs)
	}
	wantEffects(t, f, "a", 1, 0)
}

// JSON is decoded after a byte order mark and from gzip. Other text, and a body that unpacks to too much, are dead letters.
func testEncodings(t *testing.T, f Fixture) {
	p := f.Processor(t, "a", succeed)
	const marked = "\xef\xbb\xbf{\"number\":1}"
	for _, m := range []*inbox.Message{
		{Body: []byte(marked), ContentType: "application/json; charset=utf-8"},
		{Body: gzipped([]byte(marked)), ContentEncoding: "gzip"},
	} {
		m.ID, m.Name, m.Attempt = ids.New(), Name, 1
		mustProcess(t, p, m)
	}
	wantEffects(t, f, "a", 1, 2)
	for name, m := range map[string]*inbox.Message{
		"plain text":  {Body: []byte("number=1")},
		"gzip as is":  {Body: gzipped([]byte(marked))},
		"cut gzip":    {Body: gzipped([]byte(marked))[:20], ContentEncoding: "gzip"},
		"gzip of all": {Body: gzipped(make([]byte, driver.MaxBodyBytes+1)), ContentEncoding: "gzip"},
	} {
		m.ID, m.Name, m.Attempt = ids.New(), Name, 1
		failure := driver.Classify(process(t.Context(), t, p, m))
		if failure.Action != driver.ActionDead || failure.Class != driver.ClassValidation {
			t.Errorf("%s: %+v", name, failure)
		}
	}
	wantEffects(t, f, "a", 1, 2)
}

func gzipped(body []byte) []byte {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, _ = w.Write(body) // a bytes.Buffer takes everything
	_ = w.Close()
	return packed.Bytes()
}

func testPanic(t *testing.T, f Fixture) {
	fail := true
	p := f.Processor(t, "a", func(context.Context, Event) error {
		if fail {
			panic("out of order")
		}
		return nil
	})
	m := event(1)
	err := process(t.Context(), t, p, m)
	caught, ok := errors.AsType[*base.Panic](err)
	if failure := driver.Classify(err); !ok || failure.Class != driver.ClassDefault || failure.Action != driver.ActionRetry {
		t.Fatalf("error = %v, classified %+v", err, failure)
	}
	if caught.Value != "out of order" || !strings.Contains(string(caught.Stack), "testPanic") {
		t.Errorf("panic = %v, stack:\n%s", caught.Value, caught.Stack)
	}
	wantEffects(t, f, "a", 1, 0)
	fail = false
	mustProcess(t, p, m)
	wantEffects(t, f, "a", 1, 1)
}

func testMessageInContext(t *testing.T, f Fixture) {
	m := event(1)
	mustProcess(t, f.Processor(t, "a", func(ctx context.Context, _ Event) error {
		if got, ok := inbox.FromContext(ctx); !ok || got != m {
			return fmt.Errorf("message in context: %v, %v", got, ok)
		}
		return nil
	}), m)
}

func testSeveral(t *testing.T, f Fixture) {
	boom := errors.New("boom")
	p := f.Processor(t, "a", func(_ context.Context, e Event) error {
		if e.Number == 2 {
			return boom
		}
		return nil
	})
	first := event(1)
	unknown := event(4)
	unknown.Name = "conformance.unknown"
	results := p.Process(t.Context(), []*inbox.Message{first, event(2), unknown, event(3), first})
	if len(results) != 5 {
		t.Fatalf("%d results for 5 messages", len(results))
	}
	if results[0] != nil || !errors.Is(results[1], boom) || results[2] == nil || results[3] != nil || results[4] != nil {
		t.Errorf("results = %v", results)
	}
	for number, want := range []int{0, 1, 0, 1, 0} {
		wantEffects(t, f, "a", number, want)
	}
	if got := p.Process(t.Context(), nil); len(got) != 0 {
		t.Errorf("%d results for no messages", len(got))
	}
}

func testDraining(t *testing.T, f Fixture) {
	ctx, cancel := context.WithCancelCause(t.Context())
	var runs atomic.Int32
	p := f.Processor(t, "a", func(ctx context.Context, _ Event) error {
		if runs.Add(1) == 1 {
			cancel(inbox.ErrDraining)
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	running, waiting := event(1), event(2)
	for i, err := range p.Process(ctx, []*inbox.Message{running, waiting}) {
		if failure := driver.Classify(err); failure.Action != driver.ActionReturn || failure.Counted {
			t.Errorf("message %d: %v classified %+v", i, err, failure)
		}
	}
	mustProcess(t, p, running)
	mustProcess(t, p, waiting)
	wantEffects(t, f, "a", 1, 1)
	wantEffects(t, f, "a", 2, 1)
}

func testDone(t *testing.T, f Fixture) {
	p := f.Processor(t, "a", succeed)
	mustProcess(t, p, event(1))
	mustProcess(t, p, event(2))
	wantEffects(t, f, "a", 1, 1)
	wantEffects(t, f, "a", 2, 1)
}

func testDuplicate(t *testing.T, f Fixture) {
	runs := 0
	count := func(context.Context, Event) error { runs++; return nil }
	m := event(1)
	mustProcess(t, f.Processor(t, "a", count), m)
	mustProcess(t, f.Processor(t, "a", count), m) // another process of the same consumer
	wantEffects(t, f, "a", 1, 1)
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs)
	}
}

func testRetry(t *testing.T, f Fixture) {
	boom := errors.New("boom")
	fail := true
	p := f.Processor(t, "a", func(context.Context, Event) error {
		if fail {
			return boom
		}
		return nil
	})
	m := event(1)
	for range 2 {
		if err := process(t.Context(), t, p, m); !errors.Is(err, boom) {
			t.Fatalf("error = %v, want the handler's", err)
		}
	}
	wantEffects(t, f, "a", 1, 0)
	fail = false
	mustProcess(t, p, m)
	wantEffects(t, f, "a", 1, 1)
}

func testMarkers(t *testing.T, f Fixture) {
	boom := errors.New("boom")
	var result error
	p := f.Processor(t, "a", func(context.Context, Event) error { return result })
	for _, result = range []error{
		boom, inbox.Unrecoverable(boom), inbox.RetryAfter(boom, time.Minute),
		inbox.Classed(boom, "payment"), fmt.Errorf("a: %w", inbox.Invalid(boom)), inbox.Postpone(boom, 1),
	} {
		err := process(t.Context(), t, p, event(1))
		got, want := driver.Classify(err), driver.Classify(result)
		got.Err, want.Err = nil, nil
		if got != want || !errors.Is(err, boom) {
			t.Errorf("handler's %v came back as %v: %+v, want %+v", result, err, got, want)
		}
	}
}

func testConsumers(t *testing.T, f Fixture) {
	m := event(1)
	for _, consumer := range []string{"a", "b", "a"} {
		mustProcess(t, f.Processor(t, consumer, succeed), m)
	}
	wantEffects(t, f, "a", 1, 1)
	wantEffects(t, f, "b", 1, 1)
}

func testConcurrentDuplicates(t *testing.T, f Fixture) {
	const copies = 8
	m := event(1)
	p := f.Processor(t, "a", succeed)
	var wg sync.WaitGroup
	for range copies {
		wg.Go(func() { untilDone(t, p, m) })
	}
	wg.Wait()
	wantEffects(t, f, "a", 1, 1)
}

// untilDone delivers a message like a broker until it is acknowledged.
func untilDone(t *testing.T, p inbox.Processor, m *inbox.Message) {
	for {
		results := p.Process(t.Context(), []*inbox.Message{m})
		failure := driver.Classify(results[0])
		if results[0] == nil {
			return
		}
		if failure.Counted || failure.Action == driver.ActionDead {
			t.Errorf("a concurrent copy counts as a failure: %v", results[0])
			return
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
			return
		}
	}
}

// TestLedger tests the contract of a driver.Ledger. newLedgers returns empty ledgers, one per consumer, in
// the same store.
func TestLedger(t *testing.T, newLedgers func(t *testing.T) func(consumer string) driver.Ledger) {
	for name, test := range map[string]func(*testing.T, ledgerTester){
		"runs":       testLedgerRuns,
		"leftovers":  testLedgerLeftovers,
		"replays":    testLedgerReplays,
		"overdue":    testLedgerOverdue,
		"concurrent": testLedgerConcurrent,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ledgers := newLedgers(t)
			test(t, ledgerTester{ledgers("a"), ledgers("b")})
		})
	}
}

type ledgerTester struct {
	driver.Ledger
	other driver.Ledger // another consumer's
}

func (l ledgerTester) do(t *testing.T, m *inbox.Message, steps ...string) {
	t.Helper()
	for _, step := range steps {
		var err error
		switch step {
		case "start":
			err = l.Start(t.Context(), m)
		case "end":
			err = l.End(t.Context(), m)
		case "pass":
			err = l.Pass(t.Context(), m, time.Hour)
		case "forget":
			err = l.Forget(t.Context(), m.ID)
		default:
			t.Fatalf("no step %q", step)
		}
		if err != nil {
			t.Fatalf("%s: %v", step, err)
		}
	}
}

func (l ledgerTester) want(t *testing.T, m *inbox.Message, open int, leftover bool) {
	t.Helper()
	e, err := l.Look(t.Context(), m.ID)
	if err != nil {
		t.Fatalf("Look: %v", err)
	}
	if got := e.OpenRuns(m); got != open {
		t.Errorf("%d open runs, want %d: %+v", got, open, e)
	}
	if got := e.Supersedes(m); got != leftover {
		t.Errorf("attempt %d of replay %d: superseded %v, want %v: %+v", m.Attempt, m.Replays, got, leftover, e)
	}
}

func testLedgerRuns(t *testing.T, l ledgerTester) {
	m, other := event(1), event(2)
	l.want(t, m, 0, false)
	l.do(t, m, "start", "start")
	l.do(t, other, "start")
	l.want(t, m, 2, false)
	l.want(t, other, 1, false)
	ledgerTester{Ledger: l.other}.want(t, m, 0, false)
	l.do(t, m, "end")
	l.want(t, m, 0, false)
	l.do(t, m, "start")
	l.want(t, m, 1, false)
	l.do(t, m, "forget", "forget", "end")
	l.want(t, m, 0, false)
}

func testLedgerLeftovers(t *testing.T, l ledgerTester) {
	first := event(1)
	second, third := *first, *first
	second.Attempt, third.Attempt = 2, 3
	l.do(t, first, "pass")
	l.want(t, first, 0, true)
	l.want(t, &second, 0, false)
	l.do(t, &second, "start", "pass")
	l.do(t, first, "start", "pass") // an extra copy that had started before resets nothing
	l.want(t, &second, 0, true)
	l.want(t, &third, 0, false)
	l.do(t, &third, "forget")
	l.want(t, first, 0, false)
}

// A copy is overdue from its due time on. An extra copy does not change that time.
func testLedgerOverdue(t *testing.T, l ledgerTester) {
	m := event(1)
	second := *m
	second.Attempt = 2
	pass := func(m *inbox.Message, after time.Duration, late bool) {
		t.Helper()
		if err := l.Pass(t.Context(), m, after); err != nil {
			t.Fatal(err)
		}
		e, err := l.Look(t.Context(), m.ID)
		if err != nil || late != (e.Overdue >= time.Hour) || !late && e.Overdue != 0 {
			t.Errorf("%v after a retry in %v: %+v, error %v", m.Attempt, after, e, err)
		}
	}
	pass(m, time.Hour, false)
	pass(&second, -time.Hour, true)
	pass(m, time.Hour, true)
	pass(&second, time.Hour, false)
}

func testLedgerReplays(t *testing.T, l ledgerTester) {
	late := event(1)
	late.Attempt = 6
	replayed := *late
	replayed.Attempt, replayed.Replays = 1, 1
	l.do(t, late, "pass", "start", "start")
	l.want(t, &replayed, 0, false)
	l.do(t, &replayed, "start")
	l.want(t, &replayed, 1, false)
	l.want(t, late, 1, true)
	l.do(t, &replayed, "pass")
	l.want(t, &replayed, 0, true)
}

func testLedgerConcurrent(t *testing.T, l ledgerTester) {
	const n = 8
	m := event(1)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if err := l.Start(t.Context(), m); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	l.want(t, m, n, false)
}

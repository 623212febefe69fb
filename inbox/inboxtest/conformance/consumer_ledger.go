package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
)

// crashed notes runs of a message that did not end.
func crashed(t *testing.T, l driver.Ledger, m *inbox.Message, attempt, times int) {
	t.Helper()
	noted := *m
	noted.Attempt = attempt
	for range times {
		if err := l.Start(t.Context(), &noted); err != nil {
			t.Fatal(err)
		}
	}
}

func entry(t *testing.T, l driver.Ledger, id uuid.UUID) driver.LedgerEntry {
	t.Helper()
	e, err := l.Look(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// The leftover of an attempt is dropped once its retry is known of, and only then.
func testConsumerLeftover(t *testing.T, f ConsumerFixture) {
	if f.New(t).Traits().MoveSettles {
		t.Skip("its moves leave nothing behind")
	}
	ledger := memory.NewLedger()
	left, current := named("leftover"), named("current")
	for m, attempt := range map[*inbox.Message]int{left: 2, current: 1} {
		noted := *m
		noted.Attempt = attempt
		if err := ledger.Pass(t.Context(), &noted); err != nil {
			t.Fatal(err)
		}
	}
	failedOnce(t, f, left, current) // what a crash after the retry would have left, and the retry
	r := &runs{}
	var log logText
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}})
	awaitCount(t, "messages done", 1, r.finished)
	await(t, func() error {
		if !strings.Contains(log.String(), "leftover of an earlier attempt dropped") {
			return errors.New("the leftover was not dropped")
		}
		return nil
	})
	w.stop()
	if seen := r.messages(); len(seen) != 1 || seen[0].ID != current.ID {
		t.Errorf("processed %+v", seen)
	}
	if e := entry(t, ledger, left.ID); e.Attempt != 3 {
		t.Errorf("entry of the leftover's message: %+v", e)
	}
	if e := entry(t, ledger, current.ID); e != (driver.LedgerEntry{}) {
		t.Errorf("entry of a processed message: %+v", e)
	}
	wantRest(t, f, 0)
}

// Where a move also ends the original, a message whose retry is known of has lost that by a fault of the
// server: it is the only copy, and goes on at the attempt that is known of.
func testConsumerLostRetry(t *testing.T, f ConsumerFixture) {
	if !f.New(t).Traits().MoveSettles {
		t.Skip("its moves may leave the original behind")
	}
	ledger := memory.NewLedger()
	m := named("event")
	failedOnce(t, f, m)
	noted := *m
	noted.Attempt = 2
	if err := ledger.Pass(t.Context(), &noted); err != nil {
		t.Fatal(err)
	}
	r := &runs{}
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{})
	awaitCount(t, "messages done", 1, r.finished)
	w.stop()
	if seen := r.messages(); seen[0].ID != m.ID || seen[0].Attempt != 3 {
		t.Errorf("processed %+v", seen)
	}
	if e := entry(t, ledger, m.ID); e != (driver.LedgerEntry{}) {
		t.Errorf("entry of a processed message: %+v", e)
	}
	wantRest(t, f, 0)
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

// A message in whose runs the process ended is run alone, and in the end not any more; what ran
// beside it is spared.
func testConsumerQuarantine(t *testing.T, f ConsumerFixture) {
	ledger := memory.NewLedger()
	killer, suspect, neighbour := named("killer"), named("suspect"), named("neighbour")
	crashed(t, ledger, killer, 2, 3)
	crashed(t, ledger, suspect, 2, 2)
	failedOnce(t, f, killer)
	inVain(t, f, 1)
	publishMany(t, f, "event", 2)
	failedOnceBehind(t, f, neighbour, suspect)
	publishMany(t, f, "event", 4)
	var running, most atomic.Int64
	var mu sync.Mutex
	beside := map[uuid.UUID]int64{}
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		n := running.Add(1)
		defer running.Add(-1)
		most.Store(max(most.Load(), n))
		time.Sleep(50 * time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		beside[m.ID] = max(n, running.Load())
		return nil
	}}
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{MaxCrashes: 3, Concurrency: 4}})
	letter := awaitDead(t, f, 1)[0]
	if letter.Message.ID != killer.ID || letter.Class != driver.ClassQuarantined || letter.Attempts != 2 {
		t.Errorf("quarantined %+v", letter)
	}
	awaitCount(t, "messages done", 8, r.finished)
	w.stop()
	mu.Lock()
	defer mu.Unlock()
	if beside[suspect.ID] != 1 {
		t.Errorf("%d messages ran beside the suspect", beside[suspect.ID])
	}
	if beside[killer.ID] != 0 || most.Load() < 2 {
		t.Errorf("the killer ran: %v; at most %d ran at once", beside[killer.ID] != 0, most.Load())
	}
	if e := entry(t, ledger, suspect.ID); e.Open != 0 {
		t.Errorf("the suspect's entry: %+v", e)
	}
}

// failedOnceBehind is failedOnce for a queue that holds others.
func failedOnceBehind(t *testing.T, f ConsumerFixture, msgs ...*inbox.Message) {
	t.Helper()
	f.Publish(t, msgs...)
	source := running(t, f.SourceFixture)
	s := begin(t, source, 100)
	for moved := 0; moved < len(msgs); {
		d := take(t, s, 1)[0]
		// A retry may come again before what is new.
		if d.Message().Attempt == 1 && slices.ContainsFunc(msgs, func(m *inbox.Message) bool { return m.ID == d.Message().ID }) {
			if err := errors.Join(move(t, source, s, later(d, 0, driver.Progress{Attempt: 2, FirstFailedAt: time.Now()}))...); err != nil {
				t.Fatal(err)
			}
			moved++
		}
	}
	ended(t, s)
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

// A drain closes the runs it has to give up: it is not the messages that end the process.
func testConsumerDrainClosesRuns(t *testing.T, f ConsumerFixture) {
	ledger := memory.NewLedger()
	release := make(chan struct{})
	defer close(release)
	r := &runs{do: func(context.Context, *inbox.Message) error { <-release; return nil }}
	m := named("event")
	failedOnce(t, f, m)
	const limit = 20 * time.Second // a tenth of it is for the notes, on a busy machine too
	w := consume(t, f, remembering{r, ledger}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: limit}})
	awaitCount(t, "messages begun", 1, r.count)
	if e := entry(t, ledger, m.ID); e.Open != 1 {
		t.Errorf("while it runs: %+v", e)
	}
	wantEnd(t, w, limit)
	if e := entry(t, ledger, m.ID); e.Open != 0 {
		t.Errorf("after the drain: %+v", e)
	}
}

package engine_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// A message that succeeds is processed once. A message that fails is retried, and then becomes a dead letter.
func TestConsume(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			switch m.Name {
			case "bad":
				return errBroken
			case "hopeless":
				return inbox.Unrecoverable(errBroken)
			case "exit":
				runtime.Goexit()
			case "panic":
				panic("oops")
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2}}, memqueue.Options{})
		for _, name := range []string{"good", "bad", "hopeless", "exit", "panic"} {
			b.put(name, 20)
		}
		noError(t, b.queue.Put(&inbox.Message{Name: "nameless"}))
		if err := ready(b); err == nil || err.Error() != "inboxtest: not running" {
			t.Errorf("before Run: %v", err)
		}
		b.start()
		b.idle()
		synctest.Wait()
		noError(t, ready(b))
		if took := b.stop(); took != 0 {
			t.Errorf("it took %v to stop", took)
		}
		count := map[string]int{}
		for _, m := range got.messages() {
			count[fmt.Sprint(m.Name, m.Attempt)]++
		}
		for what, n := range map[string]int{"good1": 20, "good2": 0, "bad3": 20, "bad4": 0, "hopeless1": 20, "hopeless2": 0, "exit3": 20, "panic3": 20} {
			if count[what] != n {
				t.Errorf("%s was processed %d times, want %d", what, count[what], n)
			}
		}
		for class, n := range map[string]int{"default": 60, "unrecoverable": 20, "validation": 1} {
			if letters := b.letters(class); len(letters) != n {
				t.Errorf("%d letters of %s, want %d", len(letters), class, n)
			}
		}
		if d := b.letters("default")[0]; d.Attempts != 3 || d.Consumer != "orders" || d.FirstFailedAt.IsZero() {
			t.Errorf("%+v", d)
		}
	})
}

// While a server is down, messages wait uncounted and nothing runs in a hot loop.
func TestUnavailable(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("ordered %v", ordered), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var down atomic.Bool
				down.Store(true)
				got := &recorder{fail: func(context.Context, *inbox.Message) error {
					if down.Load() {
						return inbox.Unavailable(errBroken)
					}
					return nil
				}}
				b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}, memqueue.Options{Exclusive: ordered})
				b.put("good", 40)
				b.start()
				eventually(t, "paused", func() bool { err := ready(b); return err != nil && strings.Contains(err.Error(), "paused") })
				time.Sleep(time.Minute)
				if n := len(got.messages()); n > 400 || n < 20 {
					t.Errorf("%d attempts in a minute", n)
				}
				down.Store(false)
				began := time.Now()
				b.idle()
				if took := time.Since(began); took > 10*time.Second {
					t.Errorf("it took %v", took)
				}
				b.stop()
				for _, m := range got.messages() {
					if m.Attempt != 1 {
						t.Fatalf("attempt %d", m.Attempt)
					}
				}
			})
		})
	}
}

// Messages that fail as in an outage delay the others only for a moment, and become dead letters.
func TestSuspects_becomeDeadLetters(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]inbox.ConsumerConfig{
		"one by one": {Concurrency: 2}, "batches": {Concurrency: 2, Batch: 10}, "ordered": {Concurrency: 2, Ordered: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const bad, good = 60, 200
				got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
					if m.Name == "bad" {
						return inbox.Unavailable(errBroken)
					}
					return nil
				}}
				b := newBench(t, got, engine.Config{ConsumerConfig: cfg}, memqueue.Options{Exclusive: cfg.Ordered})
				if cfg.Ordered {
					b.put("bad", 3)
				} else {
					b.put("bad", bad)
				}
				b.put("good", good)
				b.start()
				eventually(t, "all are dead", func() bool {
					b.put("good", 1)
					return len(b.letters("default")) == bad || cfg.Ordered && len(b.letters("default")) == 3
				})
				b.idle()
				b.stop()
				for _, m := range got.messages() {
					if m.Name == "good" && m.Attempt != 1 {
						t.Fatalf("a good message came as attempt %d", m.Attempt)
					}
				}
			})
		})
	}
}

// A destination that rejects messages does not stop the good messages, and gets the failed ones in the end.
func TestRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var full atomic.Bool
		full.Store(true)
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" {
				return inbox.Invalid(errBroken)
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{}, memqueue.Options{Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
			if at == memqueue.Move && full.Load() {
				return memqueue.Refuse
			}
			return memqueue.OK
		}})
		b.put("bad", 40)
		good := b.put("good", 100)
		b.start()
		eventually(t, "the good ones have passed", func() bool {
			n := 0
			for _, m := range got.messages() {
				if m.Name == "good" {
					n++
				}
			}
			return n == len(good)
		})
		time.Sleep(time.Second)
		if err := ready(b); err == nil || !strings.Contains(err.Error(), "rejects messages") {
			t.Errorf("ready: %v", err)
		}
		full.Store(false)
		b.idle()
		time.Sleep(2 * time.Minute)
		noError(t, ready(b))
		b.stop()
		letters := b.letters("validation")
		if len(letters) != 40 {
			t.Errorf("%d letters", len(letters))
		}
		for _, d := range letters {
			if d.Attempts != 1 {
				t.Errorf("a letter after %d attempts", d.Attempts)
			}
		}
	})
}

// Failed messages that cannot be moved occupy no worker, and have a window of their own.
func TestMove_unavailableStopsNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var down atomic.Bool
		down.Store(true)
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" {
				return inbox.Unrecoverable(errBroken)
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4}}, memqueue.Options{Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
			if at == memqueue.Move && down.Load() {
				return memqueue.FailBefore
			}
			return memqueue.OK
		}})
		b.put("bad", 100)
		b.put("good", 100)
		b.start()
		eventually(t, "all have been tried", func() bool { return len(got.messages()) == 200 })
		down.Store(false)
		b.idle()
		b.stop()
		if n := len(got.messages()); n != 200 || len(b.letters("unrecoverable")) != 100 {
			t.Errorf("%d attempts, %d letters", n, len(b.letters("unrecoverable")))
		}
	})
}

// A drain finishes running messages, requeues those that have not started, and counts nothing.
func TestDrain(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		for name, tt := range map[string]struct {
			handler func(ctx context.Context)
			min     time.Duration
			left    int // in the queue
		}{
			"finishes":   {func(context.Context) { time.Sleep(20 * time.Second) }, 19 * time.Second, 8},
			"returns":    {func(ctx context.Context) { <-ctx.Done() }, 54 * time.Second, 10},
			"ignores it": {func(context.Context) { time.Sleep(time.Hour) }, 57 * time.Second, 10},
		} {
			t.Run(fmt.Sprintf("%s, ordered %v", name, ordered), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					got := &recorder{fail: func(ctx context.Context, _ *inbox.Message) error { tt.handler(ctx); return ctx.Err() }}
					b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Prefetch: 6, HandlerTimeout: 2 * time.Hour, Ordered: ordered}}, memqueue.Options{Exclusive: ordered})
					b.put("slow", 10)
					b.start()
					time.Sleep(time.Second)
					took := b.stop()
					if took < tt.min || took > 60*time.Second {
						t.Errorf("it took %v", took)
					}
					if n := len(got.messages()); n != 2 {
						t.Errorf("%d messages begun", n)
					}
					left := newRecount(t, b)
					if left != tt.left {
						t.Errorf("%d messages left, want %d", left, tt.left)
					}
					time.Sleep(2 * time.Hour)
				})
			})
		}
	}
}

// newRecount returns how many messages another consumer receives, all of them uncounted.
func newRecount(t *testing.T, b *bench) int {
	t.Helper()
	got := &recorder{}
	other := &bench{t: t, broker: b.broker, queue: b.queue, source: b.source, consumer: newConsumer(t, b.source, got, engine.Config{})}
	other.start()
	other.idle()
	other.stop()
	for _, m := range got.messages() {
		if m.Attempt != 1 {
			t.Errorf("attempt %d", m.Attempt)
		}
	}
	return len(got.messages())
}

// A handler that exceeds HandlerTimeout is cancelled, and reported if it ignores that.
func TestHandlerTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		got := &recorder{fail: func(ctx context.Context, m *inbox.Message) error {
			<-ctx.Done()
			if m.Name == "deaf" {
				<-release
			}
			return context.Cause(ctx)
		}}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{HandlerTimeout: time.Second, Retry: inbox.RetryPolicy{MaxAttempts: 1}}}, memqueue.Options{})
		b.put("slow", 1)
		b.start()
		time.Sleep(1100 * time.Millisecond)
		if letters := b.letters("default"); len(letters) != 1 || !strings.Contains(letters[0].Error, "inboxtest: HandlerTimeout exceeded") {
			t.Errorf("%+v", letters)
		}
		b.put("deaf", 1)
		time.Sleep(5900 * time.Millisecond)
		if err := ready(b); err != nil {
			t.Errorf("too early: %v", err)
		}
		time.Sleep(200 * time.Millisecond)
		if err := ready(b); err == nil || !strings.Contains(err.Error(), "1 handlers ignore cancellation") {
			t.Errorf("ready: %v", err)
		}
		close(release)
		b.idle()
		synctest.Wait()
		noError(t, ready(b))
		b.stop()
	})
}

// Messages that arrive while the workers are busy form a batch. Messages that failed before run alone.
func TestBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{}
		got.fail = func(_ context.Context, m *inbox.Message) error {
			time.Sleep(time.Millisecond)
			if m.Name == "bad" && m.Attempt < 3 {
				return errBroken
			}
			return nil
		}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Batch: 25, MessageLimit: 330}}, memqueue.Options{})
		b.put("good", 300)
		b.put("bad", 10)
		b.put("good", 30)
		b.start()
		noError(t, <-b.ended)
		if n := len(got.messages()); n != 330 {
			t.Errorf("%d messages handed out", n)
		}
		largest := 0
		for _, n := range got.sizes {
			largest = max(largest, n)
		}
		if largest != 25 || len(got.sizes) > 60 {
			t.Errorf("%d calls, of at most %d messages", len(got.sizes), largest)
		}
	})
}

// The limits of handlers are respected, and messages of other handlers overtake.
func TestHandlerLimits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var running, most atomic.Int64
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			if m.Name == "slow" {
				most.Store(max(most.Load(), running.Add(1)))
				time.Sleep(10 * time.Second)
				running.Add(-1)
			}
			return nil
		}}
		b := newBench(t, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8}}, memqueue.Options{})
		b.put("slow", 50)
		b.put("quick", 200)
		b.start()
		eventually(t, "the quick ones have passed", func() bool {
			n := 0
			for _, m := range got.messages() {
				if m.Name == "quick" {
					n++
				}
			}
			return n == 200
		})
		if n := len(got.messages()); n > 230 {
			t.Errorf("the quick ones came after %d slow ones", n-200)
		}
		b.idle()
		b.stop()
		if n := most.Load(); n != 2 {
			t.Errorf("%d slow ones at once", n)
		}
	})
}

type limited struct{ inbox.Processor }

func (limited) Limit(name string) int {
	if name == "slow" {
		return 2
	}
	return 0
}

// An extra copy of an attempt is dropped. A message that ended the process runs alone, and after some crashes
// not any more.
func TestLedger(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		var running, most atomic.Int64
		beside := sync.Map{}
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			n := running.Add(1)
			most.Store(max(most.Load(), n))
			time.Sleep(time.Second)
			beside.Store(m.ID, max(n, running.Load()))
			running.Add(-1)
			return nil
		}}
		b := newBench(t, withLedger{got, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, MaxCrashes: 3}}, memqueue.Options{Split: true})
		killer, suspect := b.put("killer", 1)[0], b.put("suspect", 1)[0]
		leftover := b.put("leftover", 1)[0]
		deliverInVain(t, b)
		b.put("good", 8)
		for id, n := range map[uuid.UUID]int{killer: 3, suspect: 2} {
			for range n {
				noError(t, ledger.Start(t.Context(), &inbox.Message{ID: id, Attempt: 1}))
			}
		}
		noError(t, ledger.Pass(t.Context(), &inbox.Message{ID: leftover, Attempt: 1}, time.Second))
		b.start()
		b.idle()
		b.stop()
		if letters := b.letters(driver.ClassQuarantined); len(letters) != 1 || letters[0].Message.ID != killer {
			t.Errorf("%+v", letters)
		}
		if n, _ := beside.Load(suspect); n != int64(1) {
			t.Errorf("%v ran beside the suspect", n)
		}
		if _, ran := beside.Load(leftover); ran || most.Load() < 2 {
			t.Errorf("the extra copy ran: %v; at most %d at once", ran, most.Load())
		}
		if e, _ := ledger.Look(t.Context(), suspect); e != (driver.LedgerEntry{}) {
			t.Errorf("entry %+v", e)
		}
	})
}

// If the ledger has a newer copy of a message, the message is an extra copy only where a move can leave it
// behind. Otherwise the server has lost the newer copy.
func TestNewerCopyNoted(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		split, ordered bool
		replays        int           // of the copy, at its second attempt
		late           time.Duration // when its message comes again after its time
		want           int           // the attempt that runs; 0: none
	}{
		{split: true},
		{split: true, replays: 1},
		{split: true, late: 4 * time.Minute},
		{split: true, late: 6 * time.Minute, want: 2}, // the copy is lost
		{split: true, replays: 1, late: 6 * time.Minute, want: 2},
		{split: true, ordered: true, replays: 1, late: 6 * time.Minute, want: 2},
		{split: true, ordered: true, want: 2}, // it was in flight
		{split: true, ordered: true, replays: 1},
		{want: 2},
		{replays: 1, want: 1},
		{ordered: true, want: 2},
		{ordered: true, replays: 1, want: 1},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				ledger := memory.NewLedger()
				var ran []int
				got := processorFunc(func(_ context.Context, m *inbox.Message) error {
					ran = append(ran, m.Attempt)
					return nil
				})
				b := newBench(t, withLedger{got, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: c.ordered}},
					memqueue.Options{Split: c.split, Exclusive: c.ordered})
				id := b.put("event", 1)[0]
				deliverInVain(t, b)
				noError(t, ledger.Pass(t.Context(), &inbox.Message{ID: id, Attempt: 1, Replays: c.replays}, time.Hour))
				if c.late > 0 {
					time.Sleep(time.Hour + c.late)
				}
				b.start()
				b.idle()
				b.stop()
				if c.want == 0 && len(ran) > 0 || c.want > 0 && !slices.Equal(ran, []int{c.want}) {
					t.Errorf("attempts %v ran, want %d", ran, c.want)
				}
			})
		})
	}
}

// deliverInVain delivers the messages of the queue to a session that does not settle them.
func deliverInVain(t *testing.T, b *bench) {
	t.Helper()
	source := b.queue.Source(memqueue.Options{})
	s, err := source.Open(t.Context())
	noError(t, err)
	noError(t, s.Start(t.Context(), 100))
	if _, err := s.Receive(t.Context(), 100); err != nil {
		t.Fatal(err)
	}
	noError(t, s.Close(t.Context()))
}

// A queue that is deleted and declared again is consumed again.
func TestMissingQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{}
		b := newBench(t, got, engine.Config{}, memqueue.Options{})
		b.queue.Delete()
		b.start()
		time.Sleep(time.Minute)
		if err := ready(b); err == nil || !strings.Contains(err.Error(), "call Setup") {
			t.Errorf("ready: %v", err)
		}
		b.queue.Declare()
		b.put("good", 1)
		b.idle()
		b.stop()
		if n := len(got.messages()); n != 1 {
			t.Errorf("%d messages", n)
		}
	})
}

// A drain during a pause requeues the held messages, and ends at once.
func TestDrain_duringPause(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{fail: func(context.Context, *inbox.Message) error { return inbox.Unavailable(errBroken) }}
		b := newBench(t, got, engine.Config{}, memqueue.Options{})
		b.put("good", 40)
		b.start()
		eventually(t, "paused", func() bool { err := ready(b); return err != nil && strings.Contains(err.Error(), "paused") })
		time.Sleep(100 * time.Millisecond)
		if took := b.stop(); took > time.Second {
			t.Errorf("it took %v", took)
		}
		if n := newRecount(t, b); n != 40 {
			t.Errorf("%d messages left", n)
		}
	})
}

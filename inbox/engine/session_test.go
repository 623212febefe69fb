package engine_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// If a move takes longer than a message may stay unsettled, the session is renewed once, not over and over.
func TestRenew_onceWhileAMoveHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var opened atomic.Int64
		var down atomic.Bool
		down.Store(true)
		queue := memqueue.NewBroker().Queue("orders")
		source := heldSource{queue.Source(memqueue.Options{Exclusive: true, CallTimeout: 30 * time.Second, Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
			switch {
			case at == memqueue.Open && opened.Add(1) > 1000: // so that the bubble's time advances
				return memqueue.Hang
			case at == memqueue.Move && down.Load():
				return memqueue.Hang
			}
			return memqueue.OK
		}}), 20 * time.Second}
		got := &recorder{fail: func(context.Context, *inbox.Message) error { return inbox.Unrecoverable(errBroken) }}
		c := newConsumer(t, source, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true}})
		b := &bench{t: t, queue: queue, source: source.Source, consumer: c}
		b.start()
		b.put("bad", 3)
		time.Sleep(time.Minute)
		if n := opened.Load(); n > 10 {
			t.Errorf("%d sessions in a minute", n)
		}
		down.Store(false)
		eventually(t, "all are dead", func() bool { return len(b.letters("unrecoverable")) == 3 })
		b.stop()
	})
}

// Messages without an id are not confused with each other after a lost session.
func TestTwinsWithoutID(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{fail: func(context.Context, *inbox.Message) error { time.Sleep(time.Second); return nil }}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Batch: 4, Prefetch: 4}}, memqueue.Options{})
		b.start()
		b.put("first", 1) // the following messages wait
		for _, text := range []string{"a", "b"} {
			noError(t, b.queue.Put(&inbox.Message{ID: uuid.Nil, Name: "nameless", Body: []byte(text)}))
		}
		b.put("second", 1)
		time.Sleep(1500 * time.Millisecond)
		b.queue.Cut()
		b.idle()
		b.stop()
		bodies := map[string]bool{}
		for _, d := range b.letters("validation") {
			bodies[string(d.Message.Body)] = true
		}
		if !bodies["a"] || !bodies["b"] {
			t.Errorf("letters of %v", bodies)
		}
	})
}

// If the reply to a move was lost and the retried move finds the message gone, its key continues.
func TestOrdered_moveReplyLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var moves atomic.Int64
		got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
			if m.Name == "bad" {
				return inbox.Unrecoverable(errBroken)
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true}}, memqueue.Options{Exclusive: true, Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
			if at == memqueue.Move && moves.Add(1) == 1 {
				return memqueue.FailAfter
			}
			return memqueue.OK
		}})
		for _, name := range []string{"bad", "good"} {
			noError(t, b.queue.Put(&inbox.Message{ID: ids.New(), Name: name, Key: "k"}))
		}
		b.start()
		b.idle()
		b.stop()
		if n := len(b.letters("unrecoverable")); n != 1 {
			t.Errorf("%d letters", n)
		}
	})
}

// User functions that exit their goroutine or panic affect one message only.
func TestUserFunctions_exitOrPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		exit := func() {
			if time.Now().Nanosecond()%2 == 0 { // the clock of the bubble stands still
				runtime.Goexit()
			}
			panic("oops")
		}
		got := &recorder{}
		b := newBench(t, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{
			Ordered:  true,
			DeriveID: func(*inbox.Message) uuid.UUID { exit(); return ids.New() },
			Key:      func(*inbox.Message) string { exit(); return "k" },
		}}, memqueue.Options{Exclusive: true})
		b.start()
		for range 2 {
			noError(t, b.queue.Put(&inbox.Message{Name: "nameless"}))
			b.put("good", 1)
			b.idle()
			time.Sleep(time.Nanosecond)
		}
		b.stop()
		if n := len(b.letters("validation")); n != 2 || len(got.messages()) != 2 {
			t.Errorf("%d letters, %d messages", n, len(got.messages()))
		}
	})
}

// Recoverable failures use up no attempts of an ordered message, even after the end of its process.
func TestOrdered_recoverableFailuresAcrossProcesses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const recoverable = 10
		var runs atomic.Int64
		got := &recorder{fail: func(context.Context, *inbox.Message) error {
			switch n := runs.Add(1); {
			case n <= recoverable:
				return inbox.Recoverable(errBroken)
			case n == recoverable+1:
				return errBroken
			}
			return nil
		}}
		p := withLedger{got, memory.NewLedger()}
		cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true}}
		b := newBench(t, p, cfg, memqueue.Options{Exclusive: true})
		b.put("unsteady", 1)
		b.start()
		eventually(t, "it has failed more often than a message may", func() bool { return runs.Load() >= int64(quick.MaxAttempts)+2 })
		b.stop()
		b.consumer = newConsumer(t, b.source, p, cfg)
		b.start()
		b.idle()
		b.stop()
		if n := len(b.letters("default")); n != 0 || runs.Load() != recoverable+2 {
			t.Errorf("%d letters after %d runs", n, runs.Load())
		}
	})
}

// Many suspects beside a handler that never returns delay the others for one patience in all, not one each.
func TestSuspectsShareTheirPatience(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		release := make(chan struct{})
		var passed atomic.Bool
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			switch m.Name {
			case "deaf":
				<-release
			case "good":
				passed.Store(true)
			}
			return nil
		})
		b := newBench(t, withLedger{p, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Prefetch: 100}}, memqueue.Options{})
		b.put("deaf", 1)
		for _, id := range b.put("suspect", 20) {
			noError(t, ledger.Start(t.Context(), &inbox.Message{ID: id, Attempt: 1}))
		}
		deliverInVain(t, b)
		b.start()
		time.Sleep(20 * time.Second)
		b.put("good", 1)
		time.Sleep(time.Minute)
		if !passed.Load() {
			t.Error("the good one waits for more than a minute")
		}
		close(release)
		b.idle()
		b.stop()
	})
}

// Messages that wait for their handler's limit are requeued before the broker takes all messages back.
func TestHold_waitingMessagesAreRequeued(t *testing.T) {
	bubble(t, func(t *testing.T) {
		broker := memqueue.NewBroker()
		queue := broker.Queue("orders")
		source := impatient{held{queue.Source(memqueue.Options{})}, t}
		got := &recorder{fail: func(context.Context, *inbox.Message) error { time.Sleep(4 * time.Minute); return nil }}
		b := &bench{t: t, broker: broker, queue: queue, source: source.Source}
		b.consumer = newConsumer(t, source, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Prefetch: 60, HandlerTimeout: 5 * time.Minute}})
		b.put("slow", 30)
		b.start()
		b.idle()
		b.stop()
		if n := len(got.messages()); n != 30 {
			t.Errorf("%d runs", n)
		}
	})
}

// impatient is a source that checks for messages that stay unsettled for too long.
type impatient struct {
	held
	t *testing.T
}

func (s impatient) Open(ctx context.Context) (driver.Session, error) {
	opened, err := s.held.Open(ctx)
	if err != nil {
		return nil, err
	}
	return &impatientSession{opened, s.t, &sync.Mutex{}, map[driver.Delivery]time.Time{}}, nil
}

type impatientSession struct {
	driver.Session
	t     *testing.T
	mu    *sync.Mutex
	since map[driver.Delivery]time.Time
}

func (s *impatientSession) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	ds, err := s.Session.Receive(ctx, most)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		s.since[d] = time.Now()
	}
	return ds, err
}

func (s *impatientSession) settle(ds []driver.Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		if held := time.Since(s.since[d]); held > 25*time.Minute {
			s.t.Errorf("a message was in flight for %v", held)
		}
	}
}

func (s *impatientSession) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	s.settle(ds)
	return s.Session.Ack(ctx, ds, mayWait)
}

func (s *impatientSession) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	s.settle(ds)
	return s.Session.GiveBack(ctx, ds)
}

// slow is a source with slow moves, as if confirms were missing.
type slow struct{ driver.Source }

func (s slow) Move(ctx context.Context, moves []driver.Move) []error {
	time.Sleep(30 * time.Second)
	return s.Source.Move(ctx, moves)
}

// Failed messages that are being moved and fill the window do not block the good ones.
func TestSlowMovesLetOthersPass(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch of ", batch), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const prefetch, good = 16, 40
				var passed atomic.Int32
				p := processorFunc(func(_ context.Context, m *inbox.Message) error {
					if m.Name == "bad" {
						return errBroken
					}
					passed.Add(1)
					return nil
				})
				broker := memqueue.NewBroker()
				b := &bench{t: t, broker: broker, queue: broker.Queue("orders")}
				b.consumer = newConsumer(t, slow{b.queue.Source(memqueue.Options{})}, p,
					engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8, Prefetch: prefetch, Batch: batch}})
				b.put("bad", prefetch)
				b.put("good", good)
				b.start()
				began := time.Now()
				eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("%v behind messages that are being moved", took)
				}
				b.idle()
				b.stop()
			})
		})
	}
}

type processorFunc func(ctx context.Context, m *inbox.Message) error

func (f processorFunc) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = f(ctx, m)
	}
	return results
}

// A key waits behind its failing message, and others continue. After the dead letter the key continues.
func TestOrderedRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var seen []string
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprint(m.Key, m.Name, m.Attempt))
			if m.Name == "bad" {
				return errBroken
			}
			return nil
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Concurrency: 1, Prefetch: 10}}, memqueue.Options{Exclusive: true})
		for _, m := range []inbox.Message{{Key: "a", Name: "bad"}, {Key: "a", Name: "x"}, {Key: "b", Name: "y"}, {Name: "z"}} {
			m.ID = ids.New()
			noError(t, b.queue.Put(&m))
		}
		b.start()
		b.idle()
		b.stop()
		if got := fmt.Sprint(seen); got != "[abad1 by1 z1 abad2 abad3 ax1]" {
			t.Error(got)
		}
		letters := b.letters("default")
		if len(letters) != 1 || letters[0].Attempts != 3 || len(letters[0].Message.History) == 0 {
			t.Errorf("%+v", letters)
		}
	})
}

// An ordered retry that waits longer than the broker allows keeps its attempts, and its session is renewed in
// time.
func TestOrderedHold(t *testing.T) {
	t.Parallel()
	for _, noted := range []bool{false, true} {
		t.Run(fmt.Sprintf("ledger %v", noted), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var runs atomic.Int64
				p := processorFunc(func(_ context.Context, m *inbox.Message) error {
					if n := int(runs.Add(1)); m.Attempt != n {
						t.Errorf("run %d is attempt %d", n, m.Attempt)
					}
					return inbox.RetryAfter(errBroken, 20*time.Minute)
				})
				var processor inbox.Processor = p
				if noted {
					processor = withLedger{p, memory.NewLedger()}
				}
				broker := memqueue.NewBroker()
				queue := broker.Queue("orders")
				var opened atomic.Int64
				source := held{queue.Source(memqueue.Options{Exclusive: true, Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
					if at == memqueue.Open {
						opened.Add(1)
					}
					return memqueue.OK
				}})}
				b := &bench{t: t, broker: broker, queue: queue, source: source.Source}
				b.consumer = newConsumer(t, source, processor, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Retry: inbox.RetryPolicy{MaxAge: 2 * time.Hour}}})
				noError(t, queue.Put(&inbox.Message{ID: ids.New(), Name: "x", Key: "k"}))
				b.start()
				b.idle()
				b.stop()
				if n := runs.Load(); n < 7 || n > 8 {
					t.Errorf("%d runs in 2 hours", n)
				}
				if n := opened.Load(); n < 8 || n > 12 {
					t.Errorf("%d sessions in 2 hours", n)
				}
			})
		})
	}
}

// held is a source whose broker takes unsettled messages back after half an hour.
type held struct{ *memqueue.Source }

func (s held) Traits() (t driver.Traits) {
	t = s.Source.Traits()
	t.Hold = 30 * time.Minute
	return t
}

func (b *bench) putKey(name, key string) {
	b.t.Helper()
	noError(b.t, b.queue.Put(&inbox.Message{ID: ids.New(), Name: name, Key: key, Body: []byte("{}")}))
}

// An ordered message fails because a server is unreachable while another one succeeds. It fails again when
// nothing else is in flight. Then it is retried soon, whichever timers there are.
func TestOrdered_struckSuspectIsTriedAgain(t *testing.T) {
	for name, cfg := range map[string]inbox.ConsumerConfig{
		"usual":             {},
		"no other deadline": {HandlerTimeout: time.Millisecond, Rand: func() float64 { return 0.999 }},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var bad atomic.Int32
				p := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
					if m.Name == "bad" && bad.Add(1) <= 3 {
						return inbox.Unavailable(errBroken)
					}
					return nil
				}}
				cfg.Ordered, cfg.Concurrency = true, 2
				b := newBench(t, p, engine.Config{ConsumerConfig: cfg}, memqueue.Options{Exclusive: true})
				b.start()
				b.putKey("bad", "a")
				time.Sleep(900 * time.Millisecond)
				b.putKey("good", "b")
				time.Sleep(30 * time.Second)
				if n := bad.Load(); n != 4 {
					t.Errorf("%d runs within 30 s, want 4", n)
				}
				b.stop()
			})
		})
	}
}

// A drain requeues all messages that cannot be moved, however many.
func TestDrain_requeuesWhileNothingCanBeMoved(t *testing.T) {
	for name, ordered := range map[string]bool{"ordered": true, "unordered": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				p := &recorder{fail: func(context.Context, *inbox.Message) error { return inbox.Unrecoverable(errBroken) }}
				b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered, Prefetch: 1000}},
					memqueue.Options{Exclusive: ordered, Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
						if at == memqueue.Move {
							return memqueue.FailBefore
						}
						return memqueue.OK
					}})
				b.start()
				for i := range 1000 {
					b.putKey("x", fmt.Sprint(i))
				}
				time.Sleep(5 * time.Minute)
				if took := b.stop(); took > 5*time.Second {
					t.Errorf("the drain took %v", took)
				}
			})
		})
	}
}

// wholeFunc adapts a function to a processor.
type wholeFunc func(ctx context.Context, msgs []*inbox.Message) []error

func (f wholeFunc) Process(ctx context.Context, msgs []*inbox.Message) []error { return f(ctx, msgs) }

// A processor may keep the slice of messages: a later run of the same message does not change it.
func TestRerun_leavesKeptMessagesAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var kept [][]*inbox.Message
		p := wholeFunc(func(_ context.Context, msgs []*inbox.Message) []error {
			kept = append(kept, msgs)
			if len(kept) == 1 {
				return []error{errBroken}
			}
			return []error{nil}
		})
		b := newBench(t, p, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Concurrency: 1}}, memqueue.Options{Exclusive: true})
		b.start()
		b.putKey("x", "a")
		b.idle()
		b.stop()
		if len(kept) != 2 || kept[0][0].Attempt != 1 || kept[1][0].Attempt != 2 {
			t.Errorf("kept %v", kept)
		}
	})
}

// lostFirst returns options under which the first delivery of a queue is redelivered.
func lostFirst() memqueue.Options {
	first := true
	return memqueue.Options{Fault: func(at memqueue.Step, _ *inbox.Message) memqueue.Outcome {
		if at == memqueue.Receive && first {
			first = false
			return memqueue.Lose
		}
		return memqueue.OK
	}}
}

// A handler that waits for a message that must run alone in another consumer is not stuck.
func TestSolo_waitingIsNotStuck(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		m := &inbox.Message{ID: ids.New(), Name: "x", Attempt: 1, Body: []byte("{}")}
		noError(t, ledger.Start(t.Context(), m)) // a run that did not end
		p := &recorder{fail: func(context.Context, *inbox.Message) error {
			time.Sleep(25 * time.Second)
			return nil
		}}
		solo, q := &engine.Solo{}, &recorder{}
		a := newBench(t, withLedger{p, ledger}, engine.Config{Solo: solo}, lostFirst())
		c := newBench(t, q, engine.Config{Solo: solo, ConsumerConfig: inbox.ConsumerConfig{HandlerTimeout: 5 * time.Second}}, memqueue.Options{})
		noError(t, a.queue.Put(m))
		a.start()
		c.start()
		time.Sleep(time.Second)
		if len(p.messages()) != 1 {
			t.Fatal("the message that must run alone does not run")
		}
		c.put("y", 1)
		time.Sleep(15 * time.Second)
		if err := ready(c); err != nil || len(q.messages()) != 0 {
			t.Errorf("%d messages ran beside it, Ready = %v", len(q.messages()), err)
		}
		time.Sleep(15 * time.Second)
		if len(q.messages()) != 1 {
			t.Error("the other message did not run after it")
		}
		a.stop()
		c.stop()
	})
}

// downLedger is a ledger whose entries cannot be read.
type downLedger struct{ driver.Ledger }

func (downLedger) Look(context.Context, uuid.UUID) (driver.LedgerEntry, error) {
	return driver.LedgerEntry{}, errBroken
}

// MessageLimit counts the messages passed to the processor, not those whose ledger entry could not be read.
func TestMessageLimit_countsRuns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := &recorder{}
		b := newBench(t, withLedger{p, downLedger{memory.NewLedger()}}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MessageLimit: 1}}, lostFirst())
		b.put("x", 1)
		b.start()
		time.Sleep(time.Minute)
		if len(b.ended) != 0 || len(p.messages()) != 0 {
			t.Errorf("Run ended: %v, after %d messages", len(b.ended) == 1, len(p.messages()))
		}
		b.stop()
	})
}

package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var errBroken = errors.New("broken")

// yard is a queue in memory with consumers that park keys, and records the effects of their handlers.
type yard struct {
	t       *testing.T
	broker  *inboxtest.Broker
	manager txretry.Transactor
	entries pgdriver.Entries
	fail    func(ctx context.Context, m *inbox.Message) error // nil: none fails
	names   inboxpgx.HandlerConfig
	pool    *pgxpool.Pool                                                            // nil: in memory
	hangs   bool                                                                     // on Postgres: a statement of the handler hangs
	live    func(ctx context.Context, p *mortal, change func(*inbox.ConsumerConfig)) // runs a process until it dies or ctx ends

	mu      sync.Mutex
	number  map[uuid.UUID]int
	done    map[uuid.UUID]bool
	removed map[uuid.UUID]bool
	gone    map[uuid.UUID]bool // removed, and no copy may run
	order   map[string][]int
}

func newYard(t *testing.T) *yard {
	t.Helper()
	y := &yard{
		t: t, broker: inboxtest.NewBroker(), manager: txretrytest.New(txretrytest.Config{}), entries: memory.NewEntries(driver.DefaultRetention),
		number: map[uuid.UUID]int{}, done: map[uuid.UUID]bool{}, removed: map[uuid.UUID]bool{}, gone: map[uuid.UUID]bool{}, order: map[string][]int{},
	}
	y.live = y.liveInMemory
	y.consumer(y.store(), nil, nil) // which binds the queue
	return y
}

// inYard runs a test in a bubble.
func inYard(t *testing.T, test func(t *testing.T, y *yard)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, newYard(t)) })
}

func (y *yard) put(key string, numbers ...int) (last *inbox.Message) {
	y.t.Helper()
	for _, n := range numbers {
		last = &inbox.Message{ID: ids.New(), Name: conformance.Name, Key: key, Body: fmt.Appendf(nil, `{"number":%d}`, n)}
		y.mu.Lock()
		y.number[last.ID] = n
		y.mu.Unlock()
		noError(y.t, y.broker.Send(context.Background(), last))
	}
	return last
}

// numberOf returns the number with which a message was put.
func (y *yard) numberOf(m *inbox.Message) int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.number[m.ID]
}

// handle is the handler: the effect of a message is part of its transaction.
func (y *yard) handle(ctx context.Context, tx pgx.Tx, _ conformance.Event) error {
	m, _ := inbox.FromContext(ctx)
	y.mu.Lock()
	if y.gone[m.ID] {
		y.t.Errorf("message %d runs after its removal", y.number[m.ID])
	}
	y.mu.Unlock()
	if y.fail != nil {
		if err := y.fail(ctx, m); err != nil {
			return err
		}
	}
	if y.hangs {
		_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
		return err
	}
	if y.pool != nil {
		_, err := tx.Exec(ctx, `INSERT INTO parked_done (key, number, message_id) VALUES ($1, $2, $3)`, m.Key, y.numberOf(m), m.ID)
		return err
	}
	return txretrytest.Effect(tx, func() {
		y.mu.Lock()
		defer y.mu.Unlock()
		y.done[m.ID] = true
		if !y.removed[m.ID] {
			y.order[m.Key] = append(y.order[m.Key], y.number[m.ID])
		}
	}, func() {
		y.mu.Lock()
		defer y.mu.Unlock()
		delete(y.done, m.ID)
		if !y.removed[m.ID] {
			y.order[m.Key] = y.order[m.Key][:len(y.order[m.Key])-1]
		}
	})
}

func (y *yard) store() *inboxpgx.Store {
	y.t.Helper()
	cfg := inboxpgx.Config{ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: y.names}}
	if y.pool == nil {
		cfg.Entries = y.entries
	}
	s := newStore(y.t, y.manager, "a", cfg)
	handle(y.t, s, y.handle)
	return s
}

func (y *yard) consumer(p inbox.Processor, fault func(inboxtest.Step, *inbox.Message) inboxtest.Outcome, change func(*inbox.ConsumerConfig)) *inboxtest.Consumer {
	y.t.Helper()
	out := io.Discard
	if os.Getenv("ENGINE_LOG") != "" {
		out = os.Stdout
	}
	cfg := inbox.ConsumerConfig{
		Ordered: true, ParkKeys: true, Logger: slog.New(slog.NewTextHandler(out, nil)),
		Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 100 * time.Millisecond, MaxDelay: 200 * time.Millisecond},
	}
	if change != nil {
		change(&cfg)
	}
	c, err := inboxtest.NewConsumer(y.broker, inboxtest.Queue{Name: "orders", Fault: fault}, p, cfg)
	noError(y.t, err)
	return c
}

// run runs a consumer as a process of its own until the returned function is called.
func (y *yard) run(change func(*inbox.ConsumerConfig)) (c *inboxtest.Consumer, stop func()) {
	y.t.Helper()
	return y.runStore(y.store(), change)
}

func (y *yard) runStore(s *inboxpgx.Store, change func(*inbox.ConsumerConfig)) (c *inboxtest.Consumer, stop func()) {
	y.t.Helper()
	c = y.consumer(s, nil, change)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := c.Run(ctx); err != nil {
			y.t.Error(err)
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	y.t.Cleanup(stop)
	return c, stop
}

func (y *yard) letters() inbox.DeadLetters { return y.consumer(y.store(), nil, nil).DeadLetters() }

func (y *yard) count() int {
	n, err := y.letters().Count(context.Background(), inbox.Filter{})
	if err != nil {
		y.t.Error(err)
	}
	return n
}

func (y *yard) replay(f inbox.Filter) int {
	done, err := y.letters().Replay(context.Background(), f, inbox.Replay{By: "test", Force: true})
	if err != nil {
		y.t.Error(err)
	}
	return done.Returned
}

// waiting counts the stopped keys and their messages.
func (y *yard) waiting() (keys, messages int) {
	keys, messages, err := y.entries.Parking("a").Count(context.Background(), 10_000)
	if err != nil {
		y.t.Error(err)
	}
	return keys, messages
}

// orderOf returns the numbers of a key's messages in the order of their effects.
func (y *yard) orderOf(key string) []int {
	y.load()
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.order[key])
}

// load reads the effects from the database.
func (y *yard) load() {
	if y.pool == nil {
		return
	}
	rows, _ := y.pool.Query(context.Background(), `SELECT key, number, message_id FROM parked_done ORDER BY seq`)
	y.mu.Lock()
	defer y.mu.Unlock()
	clear(y.order)
	var key string
	var number int
	var id uuid.UUID
	if _, err := pgx.ForEachRow(rows, []any{&key, &number, &id}, func() error {
		y.done[id] = true
		if !y.removed[id] {
			y.order[key] = append(y.order[key], number)
		}
		return nil
	}); err != nil {
		y.t.Error(err)
	}
}

func (y *yard) wantOrder(key string, want ...int) {
	y.t.Helper()
	if got := y.orderOf(key); !slices.Equal(got, want) {
		y.t.Errorf("key %q has done %v, want %v", key, got, want)
	}
}

func (y *yard) wantFree() {
	y.t.Helper()
	if keys, messages := y.waiting(); keys+messages+y.count() != 0 {
		y.t.Errorf("%d keys, %d messages and %d dead letters are left", keys, messages, y.count())
	}
}

func (y *yard) idle() {
	y.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	noError(y.t, y.broker.Idle(ctx))
}

// stopped puts messages of a key; the first one becomes a dead letter.
func (y *yard) stopped(key string, numbers ...int) {
	y.t.Helper()
	p := y.entries.Parking("a")
	for i, n := range numbers {
		m := &inbox.Message{ID: ids.New(), Name: conformance.Name, Key: key, Queue: "orders", Attempt: 1, Body: fmt.Appendf(nil, `{"number":%d}`, n)}
		y.mu.Lock()
		y.number[m.ID] = n
		y.mu.Unlock()
		if i == 0 {
			noError(y.t, p.Stop(context.Background(), key, driver.NewDeadLetter(m, driver.Classify(errBroken), "a", time.Now())))
		} else {
			wait(y.t, p, key, m)
		}
	}
}

// failsUntil makes the message with a number fail until fixed is set.
func (y *yard) failsUntil(key string, number int) (fixed *atomic.Bool) {
	fixed = new(atomic.Bool)
	y.fail = func(_ context.Context, m *inbox.Message) error {
		if m.Key == key && y.numberOf(m) == number && !fixed.Load() {
			return inbox.Unrecoverable(errBroken)
		}
		return nil
	}
	return fixed
}

// A key waits behind its dead letter, and others continue. After a replay or a removal it resumes in order,
// even in a process that has received none of its messages.
func TestParkedKey(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"replay", "remove", "quiet queue", "batches"} {
		t.Run(name, func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) {
				batch := func(cfg *inbox.ConsumerConfig) {
					if name == "batches" {
						cfg.Batch = 8
					}
				}
				fixed := y.failsUntil("a", 2)
				_, stop := y.run(batch)
				y.put("a", 1, 2, 3, 4)
				y.put("b", 1, 2, 3)
				y.put("", 1)
				y.idle() // the messages behind the dead letter do not fill the window
				y.put("a", 5)
				y.idle()
				y.wantOrder("a", 1)
				y.wantOrder("b", 1, 2, 3)
				if keys, messages := y.waiting(); keys != 1 || messages != 4 || y.count() != 1 {
					t.Fatalf("%d keys, %d messages, %d dead letters", keys, messages, y.count())
				}
				stop()
				y.run(batch) // like another process
				want := []int{1, 2, 3, 4, 5, 6, 7}
				if name == "quiet queue" {
					want = slices.Delete(want, 5, 6)
				} else {
					y.put("b", 4)
					y.put("a", 6)
					y.idle()
				}
				time.Sleep(time.Hour)
				y.wantOrder("a", 1)
				fixed.Store(true)
				if name == "remove" {
					want = slices.Delete(want, 1, 2)
					if n, err := y.letters().Remove(context.Background(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || err != nil {
						t.Fatalf("removed %d, error %v", n, err)
					}
				} else if n := y.replay(inbox.Filter{}); n != 1 {
					t.Fatalf("replayed %d", n)
				}
				time.Sleep(3 * time.Second)
				y.wantOrder("a", want[:len(want)-1]...)
				y.put("a", 7)
				y.idle()
				y.wantOrder("a", want...)
				y.wantFree()
			})
		})
	}
}

// The process of a dead letter was killed before its ack, and an operator removed the dead letter: the redelivered copy
// has no effect.
func TestParkedKey_removedBeforeRedelivery(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		m := &inbox.Message{ID: ids.New(), Name: conformance.Name, Key: "a", Queue: "orders", Attempt: 1, Body: []byte(`{"number":1}`)}
		y.number[m.ID] = 1
		dead := driver.NewDeadLetter(m, driver.Classify(errBroken), "a", time.Now())
		noError(t, y.entries.Parking("a").Stop(t.Context(), "a", dead))
		if n, err := y.letters().Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || err != nil {
			t.Fatalf("removed %d, error %v", n, err)
		}
		noError(t, y.broker.Send(t.Context(), m))
		y.run(nil)
		y.put("a", 2)
		y.idle()
		time.Sleep(time.Minute)
		y.wantOrder("a", 2)
		y.wantFree()
	})
}

// Invalid messages are not parked, and do not stop their keys.
func TestParkedKey_invalidMessages(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.run(nil)
		for range 2 {
			noError(t, y.broker.Send(t.Context(), &inbox.Message{Name: conformance.Name, Key: "a"}))
		}
		y.put("a", 1)
		y.idle()
		y.wantOrder("a", 1)
		if keys, _ := y.waiting(); keys != 0 || y.count() != 2 {
			t.Errorf("%d keys, %d dead letters", keys, y.count())
		}
	})
}

// A long key, and a key returned by ConsumerConfig.Key, are parked like others. If Key exits or panics, the
// message has no key.
func TestParkedKey_madeKeys(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.fail = func(_ context.Context, m *inbox.Message) error {
			if y.numberOf(m) == 1 {
				return inbox.Unrecoverable(errBroken)
			}
			return nil
		}
		y.run(func(cfg *inbox.ConsumerConfig) {
			cfg.Key = func(m *inbox.Message) string {
				switch m.Key {
				case "panics":
					panic("no key")
				case "exits":
					runtime.Goexit()
				}
				return strings.Repeat(m.Key, 1000)
			}
		})
		for _, key := range []string{"long", "\xff", "panics", "exits"} {
			y.put(key, 1, 2)
		}
		y.idle()
		if keys, messages := y.waiting(); keys != 2 || messages != 4 || y.count() != 4 {
			t.Errorf("%d keys, %d messages, %d dead letters", keys, messages, y.count())
		}
		y.wantOrder("panics", 2)
	})
}

// However long a handler runs, a standby does not run its message. After a crash of its process, another one
// continues when the lease has ended.
func TestParkedMessage_oneProcess(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		var now, most atomic.Int32
		y.fail = func(context.Context, *inbox.Message) error {
			most.Store(max(now.Add(1), most.Load()))
			time.Sleep(2 * time.Minute)
			now.Add(-1)
			return nil
		}
		y.stopped("a", 1, 2, 3)
		y.replay(inbox.Filter{})
		for range 3 {
			y.run(func(cfg *inbox.ConsumerConfig) { cfg.HandlerTimeout = 10 * time.Minute })
		}
		time.Sleep(20 * time.Minute)
		y.wantOrder("a", 1, 2, 3)
		y.wantFree()
		if most.Load() != 1 {
			t.Errorf("%d handlers ran at once", most.Load())
		}
		y.fail = nil
		y.stopped("b", 1, 2)
		y.replay(inbox.Filter{})
		if _, err := y.entries.Parking("a").Claim(t.Context(), 10*time.Second); err != nil { // by a process that has crashed
			t.Error(err)
		}
		time.Sleep(15 * time.Second)
		y.wantOrder("b", 1, 2)
	})
}

// A message that ends the process repeatedly becomes a dead letter of class quarantined and does not run any
// more.
func TestParkedMessage_quarantined(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.stopped("a", 1, 2)
		y.replay(inbox.Filter{})
		for range 3 { // processes that crash
			h, err := y.entries.Parking("a").Claim(t.Context(), 0)
			if h == nil || err != nil {
				t.Fatalf("%+v, error %v", h, err)
			}
		}
		y.run(func(cfg *inbox.ConsumerConfig) { cfg.MaxCrashes = 3 })
		time.Sleep(time.Minute)
		y.wantOrder("a")
		if n, err := y.letters().Count(t.Context(), inbox.Filter{Class: driver.ClassQuarantined}); n != 1 || err != nil {
			t.Fatalf("%d are quarantined, error %v", n, err)
		}
		y.replay(inbox.Filter{})
		time.Sleep(time.Minute)
		y.wantOrder("a", 1, 2)
		y.wantFree()
	})
}

// A message that waits long for a connection, in many processes, does not count as one that ends the process.
func TestParkedMessage_waitsForConnection(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.fail = func(_ context.Context, m *inbox.Message) error { // one transaction runs at a time
			if m.Key == "a" {
				time.Sleep(3 * time.Minute)
			}
			return nil
		}
		for range 20 {
			y.run(func(cfg *inbox.ConsumerConfig) { cfg.HandlerTimeout = 10 * time.Minute })
		}
		for _, key := range []string{"a", "b"} {
			y.stopped(key, 1, 2)
			y.replay(inbox.Filter{})
			time.Sleep(5 * time.Second)
		}
		time.Sleep(30 * time.Minute)
		y.wantOrder("a", 1, 2)
		y.wantOrder("b", 1, 2)
		y.wantFree()
	})
}

// A message released by a process that shuts down does not count as one that ended it, and continues at once.
func TestParkedMessage_cancelledIsNoCrash(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.fail = func(ctx context.Context, _ *inbox.Message) error {
			<-ctx.Done()
			return ctx.Err()
		}
		y.stopped("a", 1, 2)
		y.replay(inbox.Filter{})
		for range 6 {
			_, stop := y.run(func(cfg *inbox.ConsumerConfig) { cfg.ShutdownTimeout = 10 * time.Second })
			time.Sleep(time.Minute / 2)
			stop()
		}
		if h, err := y.entries.Parking("a").Claim(t.Context(), 0); h == nil || h.Runs != 0 || h.Message.Attempt != 1 || err != nil {
			t.Errorf("%+v, error %v", h, err)
		}
	})
}

// A message that may have ended the process runs while no other waiting message does.
func TestParkedMessage_suspect(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		var mu sync.Mutex
		runs := map[string]int{}
		s := newStore(t, y.manager, "a", inboxpgx.Config{Entries: y.entries})
		noError(t, inboxpgx.HandlePrepared(s, conformance.Name, func(ctx context.Context, _ conformance.Event) (int, error) {
			m, _ := inbox.FromContext(ctx)
			mu.Lock()
			runs[m.Key]++
			if len(runs) > 1 && runs["a"] > 0 {
				t.Errorf("%v run at once", runs)
			}
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			defer mu.Unlock()
			delete(runs, m.Key)
			return 0, nil
		}, func(ctx context.Context, tx pgx.Tx, e conformance.Event, _ int) error { return y.handle(ctx, tx, e) }))
		for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
			y.stopped(key, 1)
		}
		y.replay(inbox.Filter{})
		if h, err := y.entries.Parking("a").Claim(t.Context(), 0); h == nil || h.Key != "a" || err != nil { // by a process that has crashed
			t.Fatalf("%+v, error %v", h, err)
		}
		y.runStore(s, nil)
		time.Sleep(time.Minute)
		y.wantFree()
	})
}

// A waiting message is retried by the retry policy, whatever its handler does, and becomes the next dead
// letter in its place.
func TestParkedMessage_fails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func() error{
		"error": func() error { return errBroken },
		"panic": func() error { panic("broken") },
		"exit":  func() error { runtime.Goexit(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) {
				var runs atomic.Int32
				y.fail = func(_ context.Context, m *inbox.Message) error {
					if y.numberOf(m) == 2 {
						runs.Add(1)
						return fail()
					}
					return nil
				}
				y.stopped("a", 1, 2, 3)
				y.replay(inbox.Filter{})
				y.run(nil)
				time.Sleep(time.Minute)
				y.wantOrder("a", 1)
				found, err := y.letters().List(t.Context(), inbox.Filter{})
				if err != nil || len(found) != 1 || runs.Load() != 3 || found[0].Message.Attempt != 3 || len(found[0].Message.History) != 2 {
					t.Errorf("%d runs, letters %+v, error %v", runs.Load(), found, err)
				}
			})
		})
	}
}

// An unreachable server costs a waiting message no attempt. If others succeed meanwhile, the message itself
// is at fault.
func TestParkedMessage_unavailable(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.fail = func(_ context.Context, m *inbox.Message) error {
			if m.Key == "a" {
				return inbox.Unavailable(errBroken)
			}
			return nil
		}
		y.stopped("a", 1, 2)
		y.replay(inbox.Filter{})
		y.run(nil)
		time.Sleep(time.Hour)
		if y.count() != 0 {
			t.Errorf("%d dead letters in an outage", y.count())
		}
		for n := range 60 {
			y.put("b", n)
			time.Sleep(time.Second)
		}
		if y.count() != 1 {
			t.Errorf("%d dead letters while others go through", y.count())
		}
	})
}

// An operator's pause applies to waiting messages, too.
func TestParkedMessage_paused(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		s := y.store()
		noError(t, s.Pause(t.Context(), "ops", "test"))
		y.stopped("a", 1, 2)
		y.replay(inbox.Filter{})
		y.runStore(s, nil)
		time.Sleep(time.Hour)
		y.wantOrder("a")
		noError(t, s.Resume(t.Context()))
		time.Sleep(5 * time.Second)
		y.wantOrder("a", 1, 2)
	})
}

// A shutdown waits for a handler of a waiting message, and cancels it when the time is up.
func TestParkedMessage_shutdown(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		takes := 20 * time.Second
		y.fail = func(ctx context.Context, _ *inbox.Message) error {
			select {
			case <-time.After(takes):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		y.stopped("a", 1, 2, 3)
		y.replay(inbox.Filter{})
		patient := func(cfg *inbox.ConsumerConfig) { cfg.HandlerTimeout, cfg.ShutdownTimeout = time.Hour, time.Minute }
		_, stop := y.run(patient)
		time.Sleep(5 * time.Second)
		stop()
		y.wantOrder("a", 1)
		takes = time.Hour
		_, stop = y.run(patient)
		time.Sleep(5 * time.Second)
		began := time.Now()
		stop()
		if took := time.Since(began); took > time.Minute {
			t.Errorf("the stop took %v", took)
		}
		takes = time.Second
		y.run(patient)
		time.Sleep(10 * time.Second)
		y.wantOrder("a", 1, 2, 3)
		y.wantFree()
	})
}

// Handlers with steps before the transaction, and handlers without a transaction, respect a stopped key.
func TestParkedKey_preparedAndFallback(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		var prepared, others []string
		var mu sync.Mutex
		note := func(where *[]string, ctx context.Context) *inbox.Message {
			mu.Lock()
			defer mu.Unlock()
			m, _ := inbox.FromContext(ctx)
			*where = append(*where, fmt.Sprint(y.number[m.ID]))
			return m
		}
		var fixed atomic.Bool
		s := newStore(t, y.manager, "a", inboxpgx.Config{Entries: y.entries})
		noError(t, inboxpgx.HandlePrepared(s, conformance.Name, func(ctx context.Context, _ conformance.Event) (int, error) {
			note(&prepared, ctx)
			return 0, nil
		}, func(ctx context.Context, tx pgx.Tx, e conformance.Event, _ int) error {
			if e.Number == 1 && !fixed.Load() {
				return inbox.Unrecoverable(errBroken)
			}
			return y.handle(ctx, tx, e)
		}))
		s.Fallback(func(ctx context.Context, _ *inbox.Message) error {
			note(&others, ctx)
			return nil
		})
		y.runStore(s, nil)
		y.put("k", 1, 2, 3)
		y.idle()
		other := &inbox.Message{ID: ids.New(), Name: "other", Key: "k", Body: []byte("{}")}
		y.mu.Lock()
		y.number[other.ID] = 4
		y.mu.Unlock()
		noError(t, y.broker.Send(t.Context(), other))
		y.idle()
		time.Sleep(time.Minute)
		mu.Lock()
		if !slices.Equal(prepared, []string{"1"}) || len(others) > 0 {
			t.Errorf("prepared %v, others %v", prepared, others)
		}
		mu.Unlock()
		fixed.Store(true)
		y.replay(inbox.Filter{})
		time.Sleep(time.Minute)
		y.wantOrder("k", 1, 2, 3)
		y.wantFree()
		mu.Lock()
		if len(others) != 1 {
			t.Errorf("others %v", others)
		}
		mu.Unlock()
	})
}

// The limit of a handler applies to waiting messages and others together.
func TestParkedMessage_limit(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.names.Concurrency = 1
		var now, most atomic.Int32
		s := newStore(t, y.manager, "a", inboxpgx.Config{Entries: y.entries, ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: y.names}})
		noError(t, inboxpgx.HandlePrepared(s, conformance.Name, func(context.Context, conformance.Event) (int, error) {
			most.Store(max(now.Add(1), most.Load()))
			time.Sleep(time.Second)
			now.Add(-1)
			return 0, nil
		}, func(ctx context.Context, tx pgx.Tx, e conformance.Event, _ int) error { return y.handle(ctx, tx, e) }))
		y.runStore(s, nil)
		for k := range 5 {
			y.stopped(fmt.Sprint("k", k), 1, 2)
			y.put("b", k)
		}
		y.replay(inbox.Filter{})
		time.Sleep(5 * time.Minute)
		y.wantFree()
		if most.Load() != 1 {
			t.Errorf("%d ran at once", most.Load())
		}
	})
}

// Many keys that resume at the same time all have their turn soon.
func TestParkedKeys_goOnAtOnce(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		y.fail = func(context.Context, *inbox.Message) error {
			time.Sleep(time.Millisecond)
			return nil
		}
		for k := range 300 {
			y.stopped(fmt.Sprint(k), 1, 2)
		}
		long := make([]int, 1000)
		y.stopped("0long", long...)
		y.run(nil)
		y.replay(inbox.Filter{})
		time.Sleep(10 * time.Second)
		for k := range 300 {
			y.wantOrder(fmt.Sprint(k), 1, 2)
		}
		y.wantFree()
	})
}

// When the maximum of messages waits, further messages of their keys stay with the broker. The consumer
// pauses, Ready reports it, and it continues by itself when an operator has freed the key.
func TestParkedMessages_bounded(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		const most, window, each = 15, 10, 40
		y.failsUntil("a", 1)
		c, _ := y.run(func(cfg *inbox.ConsumerConfig) { cfg.MaxParked, cfg.Prefetch, cfg.Concurrency = most, window, 4 })
		var want []int
		for n := 1; n <= each; n++ {
			y.put("a", n)
			want = append(want, n)
		}
		y.put("b", 1)
		for range 20 {
			time.Sleep(time.Minute)
			if _, n := y.waiting(); n != most {
				t.Fatalf("%d messages wait, want %d", n, most)
			}
			if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "MaxParked") {
				t.Fatalf("Ready: %v", err)
			}
		}
		y.wantOrder("b") // otherwise the messages in flight are not bounded
		if n, err := y.letters().Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || err != nil {
			t.Fatalf("removed %d, error %v", n, err)
		}
		time.Sleep(10 * time.Minute)
		y.wantOrder("a", want[1:]...)
		y.wantOrder("b", 1)
		y.wantFree()
		noError(t, c.Ready(t.Context()))
	})
}

// Messages stored by others count, too. Messages of keys that are not stopped continue, also those without a
// transaction.
func TestParkedMessages_boundIncludesOlderOnes(t *testing.T) {
	inYard(t, func(t *testing.T, y *yard) {
		const most = 50
		y.stopped("a", make([]int, most)...)
		s := y.store()
		var others atomic.Int32
		s.Fallback(func(context.Context, *inbox.Message) error {
			others.Add(1)
			return nil
		})
		c, _ := y.runStore(s, func(cfg *inbox.ConsumerConfig) { cfg.MaxParked = most })
		time.Sleep(time.Minute)
		y.put("a", most)
		time.Sleep(time.Minute)
		if _, n := y.waiting(); n != most {
			t.Errorf("%d messages wait", n)
		}
		if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "MaxParked") {
			t.Errorf("Ready: %v", err)
		}
		noError(t, y.broker.Send(t.Context(), &inbox.Message{ID: ids.New(), Name: "other", Key: "b", Body: []byte("{}")}))
		time.Sleep(time.Minute)
		if others.Load() != 1 {
			t.Error("a message of another key is kept back")
		}
	})
}

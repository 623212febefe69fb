package parked

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

const (
	name   = "order.placed"
	keys   = 4
	perKey = 6
)

// InMemory returns a store for Test without a server.
func InMemory(t *testing.T) *inboxpgx.Store {
	t.Helper()
	store, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), "billing", inboxpgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// OnPostgres returns a store for Test in a new schema.
func OnPostgres(t *testing.T) *inboxpgx.Store {
	t.Helper()
	manager, err := txretry.New(pgtest.New(t), txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	store, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err == nil {
		err = store.Migrate(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// run is a queue with two consumers on one store.
type run struct {
	t     *testing.T
	f     conformance.SourceFixture
	store *inboxpgx.Store
	log   *Log
	fixed atomic.Bool // the handlers of dead letters succeed
	ids   map[event]uuid.UUID
	tried sync.Map // events that have failed once
}

// Test runs two consumers with ParkKeys on a queue with exclusive sources, while connections are cut and an operator
// replays and removes dead letters. The run must be one of the model.
func Test(t *testing.T, f conformance.SourceFixture, store *inboxpgx.Store) {
	r := &run{t: t, f: f, store: store, log: NewLog(), ids: map[event]uuid.UUID{}}
	if err := inboxpgx.Handle(store, name, r.handle); err != nil {
		t.Fatal(err)
	}
	const last = perKey - 1
	for n := range last {
		for k := range keys {
			r.send(event{fmt.Sprint("key-", k), n})
		}
	}
	end := r.consume()
	r.cut()
	r.await("the keys that continue", func() error { return r.wantCommitted(0, 2, last, last) })
	r.await("two dead letters", func() error {
		depths, err := store.Parked().Depths(t.Context())
		n := 0
		for _, d := range depths {
			n += d.Messages
		}
		if err == nil && n != 2 {
			err = fmt.Errorf("%d dead letters", n)
		}
		return err
	})
	r.send(event{"key-0", 0}) // copies
	r.send(event{"key-2", 1})
	r.fixed.Store(true)
	r.operate("key-0", driver.Return)
	r.operate("key-1", driver.Drop)
	r.cut()
	r.await("the parked messages", func() error { return r.wantCommitted(last, last-1, last, last) })
	r.send(event{"key-1", 2}) // a copy of the removed message
	for k := range keys {     // behind the copies, which JetStream drops
		r.send(event{fmt.Sprint("key-", k), last})
	}
	r.await("the last messages", func() error { return r.wantCommitted(perKey, perKey-1, perKey, perKey) })
	end()
	t.Log(r.log.trace.Counts())
	if err := r.log.Check(perKey); err != nil {
		t.Error(err)
	}
}

// send sends a message, or another copy of it.
func (r *run) send(e event) {
	r.t.Helper()
	id, known := r.ids[e]
	if !known {
		id = uuid.Must(uuid.NewV7())
		r.ids[e] = id
	}
	body, err := json.Marshal(e)
	if err != nil {
		r.t.Fatal(err)
	}
	r.f.Publish(r.t, &inbox.Message{ID: id, Name: name, Key: e.Key, Body: body, ContentType: "application/json", Attempt: 1})
}

// handle fails for two messages until they are fixed, and once for some others.
func (r *run) handle(_ context.Context, tx pgx.Tx, e event) error {
	from := r.log.trace.Now()
	txretry.AfterCommit(tx, func() { r.log.commits(e, from) })
	switch {
	case !r.fixed.Load() && (e == event{"key-0", 0} || e == event{"key-1", 2}):
		return inbox.Unrecoverable(errors.New("not yet"))
	case e.Number%3 == 1:
		if _, again := r.tried.LoadOrStore(e, true); !again {
			return errors.New("try again")
		}
	}
	return nil
}

// consume starts two consumers; end stops them.
func (r *run) consume() (end func()) {
	p := &processor{r.store, r.log}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.t.Context()))
	var running sync.WaitGroup
	for range 2 {
		c, err := engine.New(source{r.f.New(r.t), r.log}, p, engine.Config{
			ConsumerConfig: inbox.ConsumerConfig{
				Name: r.store.Name(), Ordered: true, ParkKeys: true, Concurrency: 4, Logger: slog.New(slog.DiscardHandler),
				Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 20 * time.Millisecond, MaxDelay: 50 * time.Millisecond},
			},
			Queue: "orders", Package: "parked",
		})
		if err != nil {
			r.t.Fatal(err)
		}
		running.Go(func() {
			if err := c.Run(ctx); err != nil {
				r.t.Error(err)
			}
		})
	}
	end = func() {
		cancel()
		running.Wait()
	}
	r.t.Cleanup(end)
	return end
}

// cut ends all connections after some deliveries.
func (r *run) cut() {
	if r.f.Network == nil {
		return
	}
	before := r.log.trace.Counts()[deliver]
	r.await("deliveries", func() error {
		if r.log.trace.Counts()[deliver] == 0 || r.log.trace.Counts()[deliver] < before {
			return errors.New("none")
		}
		return nil
	})
	r.f.Network.CutConnections()
}

// wantCommitted checks how many messages of each key have taken effect.
func (r *run) wantCommitted(want ...int) error {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	for k, n := range want {
		got := 0
		for e := range r.log.committed {
			if e.Key == fmt.Sprint("key-", k) {
				got++
			}
		}
		if got != n {
			return fmt.Errorf("key %d: %d messages took effect, want %d", k, got, n)
		}
	}
	return nil
}

// operate replays or removes the dead letters of a key.
func (r *run) operate(of string, outcome driver.Outcome) {
	r.t.Helper()
	letters := r.store.Parked()
	depths, err := letters.Depths(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, d := range depths {
		from := r.log.trace.Now()
		var chosen []event
		err := letters.Scan(r.t.Context(), d.Class, func(dead *inbox.DeadLetter) (driver.Outcome, error) {
			if e := eventOf(&dead.Message); e.Key == of {
				chosen = append(chosen, e)
				return outcome, nil
			}
			return driver.Keep, nil
		}, func(_ inbox.DeadLetter, err error) { r.t.Error(err) })
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range chosen {
			if outcome == driver.Return {
				r.log.add(e, replay, from, func(k key) []key { return k.replay(e.Number) })
			} else {
				r.log.add(e, remove, from, func(k key) []key { return k.remove(e.Number) })
			}
		}
	}
}

func (r *run) await(what string, check func() error) {
	r.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); ; time.Sleep(10 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %v", what, err)
		}
	}
}

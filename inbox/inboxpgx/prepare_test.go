package inboxpgx_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type waiter func(ctx context.Context) error

func (w waiter) Wait(ctx context.Context) error { return w(ctx) }

func TestPrepareRunsBeforeTheTransaction(t *testing.T) {
	t.Parallel()
	manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}}})
	var trail []string
	p := newStore(t, manager, "a", inboxpgx.Config{
		Entries: memory.NewEntries(time.Hour),
		ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: {Waiter: waiter(func(context.Context) error {
			trail = append(trail, "wait")
			return nil
		})}},
	})
	begun := func() int { return manager.Stats().Attempts }
	err := inboxpgx.HandlePrepared(p, conformance.Name,
		func(_ context.Context, e conformance.Event) (string, error) {
			trail = append(trail, "prepare")
			if begun() != 0 {
				t.Error("a transaction is open")
			}
			return "rate of the day", nil
		},
		func(_ context.Context, _ pgx.Tx, _ conformance.Event, rate string) error {
			trail = append(trail, rate)
			return nil
		})
	noError(t, err)
	noError(t, process(t, p, event()))
	if got := strings.Join(trail, ", "); got != "wait, prepare, rate of the day, rate of the day" {
		t.Errorf("trail = %s", got)
	}
}

// A deadline of the consumer's that ends before the handler began, as while the database
// hangs, is no message's failure.
func TestNoChanceBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	for name, n := range map[string]int{"alone": 1, "batch": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p, _ := fakeStore(t)
				hold := make(chan struct{})
				handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error { <-hold; return nil })
				first := make(chan error)
				go func() { first <- process(t, p, event()) }() // holds the only transaction
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for _, err := range p.Process(ctx, events(n)) {
					if f := driver.Classify(err); f.Counted || f.Action != driver.ActionRetry {
						t.Errorf("%v classified %+v", err, f)
					}
				}
				close(hold)
				if err := <-first; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A Prepare step that takes all the time has failed, although it does not say so: uncounted,
// the message would come for ever.
func TestPrepareTakesAllTheTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, _ := fakeStoreWith(t, inboxpgx.HandlerConfig{Timeout: time.Minute})
		err := inboxpgx.HandlePrepared(p, conformance.Name,
			func(context.Context, conformance.Event) (int, error) { time.Sleep(2 * time.Minute); return 0, nil },
			func(context.Context, pgx.Tx, conformance.Event, int) error { t.Error("the handler ran"); return nil })
		noError(t, err)
		err = process(t, p, event())
		if f := driver.Classify(err); !f.Counted || f.Action != driver.ActionRetry {
			t.Errorf("%v classified %+v", err, f)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		go func() {
			time.Sleep(time.Second)
			cancel(inbox.ErrDraining)
		}()
		err = p.Process(ctx, events(1))[0]
		if f := driver.Classify(err); f.Counted || f.Action != driver.ActionReturn || !errors.Is(err, inbox.ErrDraining) {
			t.Errorf("while draining: %v classified %+v", err, f)
		}
	})
}

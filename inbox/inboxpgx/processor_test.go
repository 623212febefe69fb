package inboxpgx_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func event() *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: conformance.Name, Body: []byte(`{"number":1}`), Attempt: 1}
}

func process(t *testing.T, p inbox.Processor, m *inbox.Message) error {
	t.Helper()
	return p.Process(t.Context(), []*inbox.Message{m})[0]
}

func fakeStore(t *testing.T, script ...txretrytest.Fault) (*inboxpgx.Store, *memory.Entries) {
	t.Helper()
	return fakeStoreWith(t, inboxpgx.HandlerConfig{}, script...)
}

// fakeStoreWith configures the handler of conformance.Name.
func fakeStoreWith(t *testing.T, cfg inboxpgx.HandlerConfig, script ...txretrytest.Fault) (*inboxpgx.Store, *memory.Entries) {
	t.Helper()
	entries := memory.NewEntries(time.Hour)
	manager := txretrytest.New(txretrytest.Config{Script: script})
	return newStore(t, manager, "a", inboxpgx.Config{Entries: entries, ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: cfg}}), entries
}

func noEffect(context.Context, pgx.Tx, conformance.Event) error { return nil }

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := inboxpgx.New(nil, "", inboxpgx.Config{
		Table: "a b", Isolation: "sloppy", Retention: -1, ByName: map[string]inboxpgx.HandlerConfig{"x": {Timeout: -1, Concurrency: -1}},
	})
	for _, part := range []string{"Transactor", "consumer", "table", "Config.Isolation", "Config.Retention", `Config.ByName["x"].Timeout`, `Config.ByName["x"].Concurrency`} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named in %v", part, err)
		}
	}
	for _, consumer := range []string{strings.Repeat("c", 201), "a\x00b", "\xff"} {
		if _, err := inboxpgx.New(txretrytest.New(txretrytest.Config{}), consumer, inboxpgx.Config{Entries: memory.NewEntries(time.Hour)}); err == nil {
			t.Errorf("consumer %q was accepted", consumer)
		}
	}
}

func TestNewNeedsAPool(t *testing.T) {
	t.Parallel()
	if _, err := inboxpgx.New(txretrytest.New(txretrytest.Config{}), "a", inboxpgx.Config{}); err == nil || !strings.Contains(err.Error(), "inboxtest.New") {
		t.Errorf("error = %v", err)
	}
}

func TestLimit(t *testing.T) {
	t.Parallel()
	p, _ := fakeStoreWith(t, inboxpgx.HandlerConfig{Concurrency: 2})
	if own, other := p.Limit(conformance.Name), p.Limit("other"); own != 2 || other != 0 {
		t.Errorf("limits %d and %d", own, other)
	}
}

func TestHandleRefuses(t *testing.T) {
	t.Parallel()
	p, _ := fakeStore(t)
	handle(t, p, noEffect)
	prepare := func(context.Context, conformance.Event) (int, error) { return 0, nil }
	prepared := func(context.Context, pgx.Tx, conformance.Event, int) error { return nil }
	for name, err := range map[string]error{
		"twice":       inboxpgx.Handle(p, conformance.Name, noEffect),
		"no name":     inboxpgx.Handle(p, "", noEffect),
		"no function": inboxpgx.Handle[conformance.Event](p, "x", nil),
		"no prepare":  inboxpgx.HandlePrepared(p, "x", nil, prepared),
		"no handler":  inboxpgx.HandlePrepared[conformance.Event, int](p, "x", prepare, nil),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// Each way in which a transaction ends has its class, and the right outcome for the message.
func TestVerdict(t *testing.T) {
	t.Parallel()
	conflict := txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "40001"}
	for name, tt := range map[string]struct {
		script []txretrytest.Fault
		err    error // of the handler
		want   driver.Failure
		again  bool // the next delivery runs the handler again
	}{
		"conflict, then done": {script: []txretrytest.Fault{conflict}},
		"conflicts only": {
			script: []txretrytest.Fault{conflict, conflict, conflict, conflict, conflict, conflict},
			want:   driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true, Unlimited: true}, again: true,
		},
		"entry is locked": {
			script: []txretrytest.Fault{locked, locked, locked, locked, locked, locked},
			want:   driver.Failure{Class: "default", Action: driver.ActionRetry, Unlimited: true}, again: true,
		},
		"handler waits for a lock for too long": {
			err:  &pgconn.PgError{Code: "55P03"},
			want: driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true, Unlimited: true}, again: true,
		},
		"starting up": {
			script: []txretrytest.Fault{{Point: txretrytest.AtBegin, SQLSTATE: "57P03"}},
			want:   driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}, again: true,
		},
		"cannot begin": {
			script: []txretrytest.Fault{{Point: txretrytest.AtBegin, SQLSTATE: "22023"}},
			want:   driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}, again: true,
		},
		"commit refused": {
			script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "23505"}},
			want:   driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true}, again: true,
		},
		"commit lost, applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}},
			want:   driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true},
		},
		"commit lost, not applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostNotApplied}},
			want:   driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}, again: true,
		},
		"disk full": {
			err:  &pgconn.PgError{Code: "53100"},
			want: driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}, again: true,
		},
		"constraint": {
			err:  &pgconn.PgError{Code: "23505"},
			want: driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true}, again: true,
		},
		"incomparable error": {
			err:  manyErrors{"a", "b"},
			want: driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true}, again: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p, entries := fakeStore(t, tt.script...)
				runs := 0
				handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error {
					runs++
					return tt.err
				})
				m := event()
				err := process(t, p, m)
				got := driver.Classify(err)
				got.Err = nil
				if got != tt.want {
					t.Fatalf("%v classified %+v, want %+v", err, got, tt.want)
				}
				_, wrapped := errors.AsType[manyErrors](err)
				wrapped = wrapped || (got.Unavailable || got.Unlimited) && errors.Is(err, tt.err)
				if tt.err != nil && tt.err.Error() != err.Error() && !wrapped {
					t.Errorf("error = %v, want %v", err, tt.err)
				}
				tt.err = nil
				before := runs
				if err := process(t, p, m); err != nil {
					t.Fatalf("second delivery: %v", err)
				}
				if (runs > before) != tt.again || !entries.Seen("a", m.ID) {
					t.Errorf("second delivery ran the handler: %v", runs > before)
				}
			})
		})
	}
}

var locked = txretrytest.Fault{Point: txretrytest.AtBegin, SQLSTATE: "55P03"}

type manyErrors []string

func (e manyErrors) Error() string { return strings.Join(e, ", ") }

func TestNestedTransaction(t *testing.T) {
	t.Parallel()
	manager := txretrytest.New(txretrytest.Config{})
	p := newStore(t, manager, "a", inboxpgx.Config{Entries: memory.NewEntries(time.Hour)})
	handle(t, p, func(ctx context.Context, _ pgx.Tx, _ conformance.Event) error {
		return manager.Do(ctx, func(context.Context, pgx.Tx) error { return nil })
	})
	check := func(err error) {
		t.Helper()
		if f := driver.Classify(err); !errors.Is(err, txretry.ErrNested) || !f.Counted {
			t.Errorf("%v classified %+v", err, f)
		}
	}
	check(process(t, p, event()))
	for _, err := range p.Process(t.Context(), events(3)) {
		check(err)
	}
	err := manager.Do(t.Context(), func(ctx context.Context, _ pgx.Tx) error {
		return p.Process(ctx, []*inbox.Message{event()})[0]
	})
	check(err)
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, entries := fakeStoreWith(t, inboxpgx.HandlerConfig{Timeout: time.Minute})
		hold := make(chan struct{})
		slow := func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			select {
			case <-hold:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		handle(t, p, slow)
		noError(t, inboxpgx.Handle(p, "unbounded", slow))
		m := event()
		start := time.Now()
		err := process(t, p, m)
		if f := driver.Classify(err); time.Since(start) != time.Minute || !errors.Is(err, context.DeadlineExceeded) || !f.Counted {
			t.Errorf("after %v: %v classified %+v", time.Since(start), err, f)
		}
		// While another message holds the only transaction, this one has no chance.
		other := event()
		other.Name = "unbounded"
		go func() {
			if err := process(t, p, other); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		if f := driver.Classify(process(t, p, m)); f.Counted || f.Action != driver.ActionRetry {
			t.Errorf("no connection before the deadline: %+v", f)
		}
		close(hold)
		if err := process(t, p, m); err != nil || !entries.Seen("a", m.ID) {
			t.Errorf("error = %v", err)
		}
	})
}

// A handler that loses its transaction by its own fault has failed. As the server's failure, its message
// would be redelivered for ever and stop the others. TestBatchFailures has more cases.
func TestHandlerLosesItsTransaction(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]func(t *testing.T, ctx context.Context, tx pgx.Tx) error{
		"own deadline, swallowed": func(_ *testing.T, ctx context.Context, tx pgx.Tx) error {
			_ = sleepTooLong(ctx, tx)
			return nil
		},
		"idle for too long": func(t *testing.T, ctx context.Context, tx pgx.Tx) error {
			idleTooLong(t, ctx, tx)
			_, err := tx.Exec(ctx, `SELECT 1`)
			return err
		},
		"idle for too long, then nothing": func(t *testing.T, ctx context.Context, tx pgx.Tx) error {
			idleTooLong(t, ctx, tx)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, _ conformance.Event) error {
				return work(t, ctx, tx)
			})
			err := process(t, p, event())
			if f := driver.Classify(err); !f.Counted || f.Unlimited || f.Action != driver.ActionRetry {
				t.Errorf("%v classified %+v", err, f)
			}
		})
	}
}

func sleepTooLong(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond) // timing: it must pass
	defer cancel()
	_, err := tx.Exec(ctx, `SELECT pg_sleep(10)`)
	return err
}

var errStillThere = errors.New("the session is still there")

// idleTooLong returns when the server has ended the session, which the client does not know.
func idleTooLong(t *testing.T, ctx context.Context, tx pgx.Tx) {
	t.Helper()
	var pid int
	if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		t.Error(err)
	}
	if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '20ms'`); err != nil {
		t.Error(err)
	}
	watcher, err := pgx.ConnectConfig(ctx, tx.Conn().Config())
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = watcher.Close(ctx) }()
	testenv.Eventually(t, func() error {
		var there bool
		err := watcher.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, pid).Scan(&there)
		if err == nil && there {
			err = errStillThere
		}
		return err
	})
}

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

// If the consumer's deadline ends before the handler started, for example because the database hangs, the
// message has not failed.
func TestDeadline_beforeTheHandlerStarted(t *testing.T) {
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
				noError(t, <-first)
			})
		})
	}
}

// A Prepare step that uses up the time has failed, even if it returns no error: uncounted, the message would
// be redelivered for ever.
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

package inboxpgx_test

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
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func events(n int) []*inbox.Message {
	msgs := make([]*inbox.Message, n)
	for i := range msgs {
		msgs[i] = numbered(i)
	}
	return msgs
}

func numbered(i int) *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: conformance.Name, Body: fmt.Appendf(nil, `{"number":%d}`, i), Attempt: 1}
}

func failedOnes(results []error) (failed []int) {
	for i, err := range results {
		if err != nil {
			failed = append(failed, i)
		}
	}
	return failed
}

// numbersTaken returns the numbers of the events that took effect.
func numbersTaken(t *testing.T, pool *pgxpool.Pool) (numbers []int) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT number FROM effects ORDER BY number`)
	if err != nil {
		t.Fatal(err)
	}
	if numbers, err = pgx.CollectRows(rows, pgx.RowTo[int]); err != nil {
		t.Fatal(err)
	}
	return numbers
}

// Whatever a handler of a batch does wrong, it fails alone.
func TestBatchFailures(t *testing.T) {
	t.Parallel()
	const n = 20
	boom := errors.New("boom")
	for name, spoil := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"returns an error": func(context.Context, pgx.Tx) error { return boom },
		"panics":           func(context.Context, pgx.Tx) error { panic(boom) },
		"breaks a constraint": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO strict VALUES (-1)`)
			return err
		},
		"ignores a failed statement": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, `INSERT INTO strict VALUES (-1)`)
			return nil
		},
		"breaks a constraint at COMMIT": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO late VALUES (7)`)
			return err
		},
		"loses its connection": func(ctx context.Context, tx pgx.Tx) error { return sleepTooLong(ctx, tx) },
		"ends the transaction": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `ROLLBACK`)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE TABLE strict (n int CHECK (n > 0)); CREATE TABLE known (n int PRIMARY KEY);
				CREATE TABLE late (n int REFERENCES known DEFERRABLE INITIALLY DEFERRED)`)
			if err != nil {
				t.Fatal(err)
			}
			p := newProcessor(t, newManager(t, pool), inboxpgx.Config{Consumer: "a"})
			var sound atomic.Bool
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				if err := insertEffect(ctx, tx, "a", e.Number); err != nil {
					return err
				}
				if (e.Number == 3 || e.Number == 11) && !sound.Load() {
					return spoil(ctx, tx)
				}
				return nil
			}, inboxpgx.HandlerConfig{})
			msgs := events(n)
			results := p.Process(t.Context(), msgs)
			if got := failedOnes(results); !slices.Equal(got, []int{3, 11}) {
				t.Fatalf("failed: %v: %v", got, errors.Join(results...))
			}
			for _, i := range []int{3, 11} {
				if f := inbox.Classify(results[i]); !f.Counted || f.Action != inbox.ActionRetry {
					t.Errorf("%v classified %+v", results[i], f)
				}
			}
			if got := numbersTaken(t, pool); len(got) != n-2 || slices.Contains(got, 3) || slices.Contains(got, 11) {
				t.Errorf("effects of %v", got)
			}
			sound.Store(true)
			if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil {
				t.Fatal(err)
			}
			wantOneEffectEach(t, pool, n)
		})
	}
}

// What does not fail costs one transaction, also with copies in the batch and before it.
func TestBatchIsOneTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var commits atomic.Int64
	manager, err := txretry.New(pool, txretry.Config{Hooks: txretry.Hooks{OnDone: func(context.Context, txretry.Done) { commits.Add(1) }}})
	if err != nil {
		t.Fatal(err)
	}
	var skipped atomic.Int64
	p := newProcessor(t, manager, inboxpgx.Config{Consumer: "a", Hooks: inboxpgx.Hooks{
		OnDuplicate: func(context.Context, *inbox.Message) { skipped.Add(1) },
	}})
	handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		return insertEffect(ctx, tx, "a", e.Number)
	}, inboxpgx.HandlerConfig{})
	msgs := events(50)
	if err := errors.Join(p.Process(t.Context(), msgs[:10])...); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil {
		t.Fatal(err)
	}
	if commits.Load() != 2 || skipped.Load() != 10 {
		t.Errorf("%d transactions, %d copies skipped", commits.Load(), skipped.Load())
	}
	more := events(2)
	if err := errors.Join(p.Process(t.Context(), []*inbox.Message{more[0], more[1], more[0], more[0]})...); err != nil {
		t.Fatal(err)
	}
	wantOneEffectEach(t, pool, 52)
}

// Batches of the same messages in any order, from many processes at once.
func TestBatchStorm(t *testing.T) {
	t.Parallel()
	const messages, size, workers = 300, 25, 8
	pool := newPool(t)
	p := effectProcessor(t, newManager(t, pool))
	msgs := events(messages)
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			mine := slices.Clone(msgs)
			if worker%2 == 1 {
				slices.Reverse(mine)
			}
			for batch := range slices.Chunk(mine, size) {
				if err := errors.Join(p.Process(t.Context(), batch)...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	wantOneEffectEach(t, pool, messages)
}

func TestHandleBatch(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := newProcessor(t, newManager(t, pool), inboxpgx.Config{Consumer: "a"})
	var mu sync.Mutex
	var sizes []int
	err := inboxpgx.HandleBatch(p, conformance.Name, func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		mu.Lock()
		sizes = append(sizes, len(items))
		mu.Unlock()
		rows := make([][]any, len(items))
		for i, item := range items {
			rows[i] = []any{"a", item.Value.Number, item.Message.ID}
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"consumer", "number", "message_id"}, pgx.CopyFromRows(rows)); err != nil {
			return err
		}
		for _, item := range items {
			if item.Value.Number == 5 {
				return inbox.Unrecoverable(errors.New("five"))
			}
		}
		return nil
	}, inboxpgx.HandlerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	msgs := events(16)
	results := p.Process(t.Context(), msgs)
	if got := failedOnes(results); !slices.Equal(got, []int{5}) || inbox.Classify(results[5]).Action != inbox.ActionDead {
		t.Errorf("results %v", results)
	}
	if want := []int{16, 16, 8, 4, 4, 2, 1, 1, 2, 8}; !slices.Equal(sizes, want) {
		t.Errorf("called with %v messages, want %v", sizes, want)
	}
	if got := numbersTaken(t, pool); len(got) != 15 {
		t.Errorf("effects of %v", got)
	}
	if err := process(t, p, numbered(100)); err != nil || sizes[len(sizes)-1] != 1 {
		t.Errorf("a single message: %v, sizes %v", err, sizes)
	}
}

// Another name in between ends a call; the order stays.
func TestHandleBatchNeighbours(t *testing.T) {
	t.Parallel()
	p, _ := fakeProcessor(t)
	var trail []string
	err := inboxpgx.HandleBatch(p, conformance.Name, func(_ context.Context, _ pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		trail = append(trail, fmt.Sprintf("%d from %d", len(items), items[0].Value.Number))
		return nil
	}, inboxpgx.HandlerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := inboxpgx.Handle(p, "other", func(_ context.Context, _ pgx.Tx, e conformance.Event) error {
		trail = append(trail, fmt.Sprintf("other %d", e.Number))
		return nil
	}, inboxpgx.HandlerConfig{}); err != nil {
		t.Fatal(err)
	}
	msgs := events(6)
	msgs[2].Name = "other"
	if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(trail, ", "); got != "2 from 0, other 2, 3 from 3" {
		t.Error(got)
	}
}

// Middleware, Waiter and Prepare step belong to the message, also in a batch.
func TestBatchMiddleware(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, _ := fakeProcessor(t)
		boom := errors.New("boom")
		var mu sync.Mutex
		seen := map[int]error{}
		again := 0
		p.Use(func(next inbox.Handler) inbox.Handler {
			return func(ctx context.Context, m *inbox.Message) error {
				v, err := inbox.Decode[conformance.Event](m)
				if err != nil {
					return err
				}
				err = next(ctx, m)
				if v.Number == 2 && err == nil { // a second time it runs alone, and finds the entry
					err = next(ctx, m)
					again++
				}
				mu.Lock()
				defer mu.Unlock()
				seen[v.Number] = err
				return err
			}
		})
		err := inboxpgx.HandlePrepared(p, conformance.Name,
			func(ctx context.Context, e conformance.Event) (int, error) {
				time.Sleep(time.Minute)
				if e.Number == 1 {
					return 0, boom
				}
				return 10 * e.Number, nil
			},
			func(ctx context.Context, _ pgx.Tx, e conformance.Event, prepared int) error {
				m, ok := inbox.FromContext(ctx)
				if !ok || string(m.Body) != fmt.Sprintf(`{"number":%d}`, e.Number) || prepared != 10*e.Number {
					return fmt.Errorf("message %v, prepared %d", m, prepared)
				}
				return nil
			}, inboxpgx.HandlerConfig{Timeout: 90 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		results := p.Process(t.Context(), events(4))
		if took := time.Since(start); took != 2*time.Minute { // one of them goes twice
			t.Errorf("took %v: Prepare steps do not run at once", took)
		}
		if got := failedOnes(results); !slices.Equal(got, []int{1}) || !errors.Is(results[1], boom) || again != 1 {
			t.Errorf("results %v", results)
		}
		if len(seen) != 4 || seen[0] != nil || !errors.Is(seen[1], boom) {
			t.Errorf("middleware saw %v", seen)
		}
	})
}

// A handler's Timeout ends its own call and no other's.
func TestBatchTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, dedup := fakeProcessor(t)
		handle(t, p, func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			if e.Number == 1 {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		}, inboxpgx.HandlerConfig{Timeout: time.Minute})
		msgs := events(3)
		results := p.Process(t.Context(), msgs)
		if got := failedOnes(results); !slices.Equal(got, []int{1}) || !inbox.Classify(results[1]).Counted {
			t.Errorf("results %v", results)
		}
		if !dedup.Seen("a", msgs[0].ID) || dedup.Seen("a", msgs[1].ID) || !dedup.Seen("a", msgs[2].ID) {
			t.Error("entries of the wrong messages")
		}
	})
}

// A fault of the database is nobody's: all come again, uncounted.
func TestBatchUnavailable(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]txretrytest.Fault{
		"cannot begin":            {Point: txretrytest.AtBegin, SQLSTATE: "57P03"},
		"reply to COMMIT is lost": {Point: txretrytest.ReplyLostApplied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _ := fakeProcessor(t, fault)
			runs := 0
			handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error { runs++; return nil }, inboxpgx.HandlerConfig{})
			msgs := events(5)
			for _, err := range p.Process(t.Context(), msgs) {
				if f := inbox.Classify(err); !f.Unavailable || f.Counted {
					t.Errorf("%v classified %+v", err, f)
				}
			}
			if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil || runs != 5 {
				t.Errorf("%d runs, error %v", runs, err)
			}
		})
	}
}

// A conflict runs the batch again; conflicts without end single out nobody for long.
func TestBatchConflicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conflict := txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
		p, dedup := fakeProcessor(t, slices.Repeat([]txretrytest.Fault{conflict}, 6)...)
		handle(t, p, noEffect, inboxpgx.HandlerConfig{})
		msgs := events(4)
		if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil {
			t.Fatal(err)
		}
		for _, m := range msgs {
			if !dedup.Seen("a", m.ID) {
				t.Error("not recorded")
			}
		}
	})
}

// A handler that exits its goroutine leaves nobody behind.
func TestBatchGoexit(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"prepare", "handler"} {
		synctest.Test(t, func(t *testing.T) {
			p, _ := fakeProcessor(t)
			exit := func(at string, e conformance.Event) {
				if at == where && e.Number == 1 {
					runtime.Goexit()
				}
			}
			err := inboxpgx.HandlePrepared(p, conformance.Name,
				func(_ context.Context, e conformance.Event) (int, error) { exit("prepare", e); return 0, nil },
				func(_ context.Context, _ pgx.Tx, e conformance.Event, _ int) error { exit("handler", e); return nil },
				inboxpgx.HandlerConfig{})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan []error, 1)
			go func() {
				defer close(ended)
				ended <- p.Process(t.Context(), events(3))
			}()
			results := <-ended
			if where == "prepare" && !slices.Equal(failedOnes(results), []int{1}) {
				t.Errorf("results %v", results)
			}
			if where == "handler" && results != nil {
				t.Errorf("results %v of a goroutine that has exited", results)
			}
		})
	}
}

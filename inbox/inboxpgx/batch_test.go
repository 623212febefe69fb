package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/metrictest"
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

// numbersTaken returns the numbers of the messages that took effect.
func numbersTaken(t *testing.T, pool *pgxpool.Pool) (numbers []int) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT number FROM effects ORDER BY number`)
	noError(t, err)
	if numbers, err = pgx.CollectRows(rows, pgx.RowTo[int]); err != nil {
		t.Fatal(err)
	}
	return numbers
}

// Whatever a handler of a batch does wrong, only its message fails.
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
			exec(t, pool, `CREATE TABLE strict (n int CHECK (n > 0)); CREATE TABLE known (n int PRIMARY KEY);
				CREATE TABLE late (n int REFERENCES known DEFERRABLE INITIALLY DEFERRED)`)
			p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
			var sound atomic.Bool
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				if err := insertEffect(ctx, tx, "a", e.Number); err != nil {
					return err
				}
				if (e.Number == 3 || e.Number == 11) && !sound.Load() {
					return spoil(ctx, tx)
				}
				return nil
			})
			msgs := events(n)
			results := p.Process(t.Context(), msgs)
			if got := failedOnes(results); !slices.Equal(got, []int{3, 11}) {
				t.Fatalf("failed: %v: %v", got, errors.Join(results...))
			}
			for _, i := range []int{3, 11} {
				if f := driver.Classify(results[i]); !f.Counted || f.Action != driver.ActionRetry {
					t.Errorf("%v classified %+v", results[i], f)
				}
			}
			if got := numbersTaken(t, pool); len(got) != n-2 || slices.Contains(got, 3) || slices.Contains(got, 11) {
				t.Errorf("effects of %v", got)
			}
			sound.Store(true)
			noError(t, errors.Join(p.Process(t.Context(), msgs)...))
			wantOneEffectEach(t, pool, n)
		})
	}
}

// counted counts the calls that may have committed.
type counted struct {
	txretry.Transactor
	calls *atomic.Int64
}

func (c counted) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	defer c.calls.Add(1)
	return c.Transactor.DoWith(ctx, opts, fn)
}

// Pool implements driver.Pooler of txretry.
func (c counted) Pool() *pgxpool.Pool { return poolOf(c.Transactor) }

// Without failures a batch costs one transaction. Copies of processed messages cost one more, which makes no
// entry for them and is rolled back.
func TestBatchIsOneTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var commits atomic.Int64
	inner, err := txretry.New(pool, txretry.Config{})
	noError(t, err)
	meter := &metrictest.Recorder{}
	p := newStore(t, counted{inner, &commits}, "a", inboxpgx.Config{MeterProvider: meter})
	handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		return insertEffect(ctx, tx, "a", e.Number)
	})
	msgs := events(50)
	noError(t, errors.Join(p.Process(t.Context(), msgs[:10])...))
	noError(t, errors.Join(p.Process(t.Context(), msgs)...))
	if skipped := meter.Values("holdfast.inbox.messages{consumer=a,name=" + conformance.Name + ",outcome=duplicate}"); commits.Load() != 3 || !slices.Equal(skipped, []float64{10}) {
		t.Errorf("%d transactions, %v copies skipped", commits.Load(), skipped)
	}
	more := events(2)
	noError(t, errors.Join(p.Process(t.Context(), []*inbox.Message{more[0], more[1], more[0], more[0]})...))
	wantOneEffectEach(t, pool, 52)
}

// Many processes receive batches of the same messages in different orders at the same time.
func TestBatchStorm(t *testing.T) {
	t.Parallel()
	const messages, size, workers = 300, 25, 8
	pool := newPool(t)
	p := effectStore(t, newManager(t, pool))
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

// Middleware, Waiter and Prepare step belong to one message, also in a batch.
func TestBatchMiddleware(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, _ := fakeStoreWith(t, inboxpgx.HandlerConfig{Timeout: 90 * time.Second, Waiter: waiter(func(context.Context) error {
			time.Sleep(time.Minute)
			return nil
		})})
		boom := errors.New("boom")
		var trail []string
		seen := map[int]error{}
		p.Use(func(ctx context.Context, m *inbox.Message) (context.Context, func(error) error, error) {
			var v conformance.Event
			if err := inbox.DecodeJSON(m, &v); err != nil {
				return nil, nil, err
			}
			trail = append(trail, fmt.Sprintf("begin %d", v.Number))
			return context.WithValue(ctx, traceKey{}, v.Number), func(result error) error {
				trail = append(trail, fmt.Sprintf("end %d", v.Number))
				seen[v.Number] = result
				if v.Number == 3 {
					return errLate
				}
				return result
			}, nil
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
				if !ok || string(m.Body) != fmt.Sprintf(`{"number":%d}`, e.Number) || prepared != 10*e.Number || ctx.Value(traceKey{}) != e.Number {
					return fmt.Errorf("message %v, prepared %d, trace %v", m, prepared, ctx.Value(traceKey{}))
				}
				return nil
			})
		noError(t, err)
		start := time.Now()
		results := p.Process(t.Context(), events(4))
		if took := time.Since(start); took != 2*time.Minute {
			t.Errorf("took %v: Waiters and Prepare steps do not run at once", took)
		}
		if got := failedOnes(results); !slices.Equal(got, []int{1, 3}) || !errors.Is(results[1], boom) || !errors.Is(results[3], errLate) {
			t.Errorf("results %v", results)
		}
		if len(seen) != 4 || seen[0] != nil || !errors.Is(seen[1], boom) || seen[3] != nil {
			t.Errorf("middleware saw %v", seen)
		}
		if got, want := strings.Join(trail, ", "), "begin 0, begin 1, begin 2, begin 3, end 0, end 1, end 2, end 3"; got != want {
			t.Errorf("trail %s, want %s", got, want)
		}
	})
}

type traceKey struct{}

var errLate = errors.New("too late")

// The Waiter of a name and the Fallback run for their own messages only, and the middleware runs for all.
func TestBatchWaiterAndFallback(t *testing.T) {
	t.Parallel()
	full := errors.New("limiter is full")
	msgs := events(6)
	var waits atomic.Int64
	p, entries := fakeStoreWith(t, inboxpgx.HandlerConfig{Waiter: waiter(func(ctx context.Context) error {
		waits.Add(1)
		if m, _ := inbox.FromContext(ctx); m == msgs[2] {
			return full
		}
		return nil
	})})
	handle(t, p, noEffect)
	passed := 0
	p.Fallback(func(context.Context, *inbox.Message) error {
		if passed++; passed == 2 {
			panic("no")
		}
		return nil
	})
	ends := 0
	p.Use(func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
		return nil, func(result error) error { ends++; return result }, nil
	})
	msgs[0].Name, msgs[5].Body = "unknown", []byte("{")
	results := p.Process(t.Context(), msgs)
	if got := failedOnes(results); !slices.Equal(got, []int{2, 5}) || driver.Classify(results[2]).Counted || driver.Classify(results[5]).Class != driver.ClassValidation {
		t.Errorf("results %v", results)
	}
	if entries.Seen("a", msgs[0].ID) || !entries.Seen("a", msgs[1].ID) || entries.Seen("a", msgs[2].ID) || ends != 6 || waits.Load() != 4 {
		t.Errorf("entries of the wrong messages, or %d ends, %d waits", ends, waits.Load())
	}
	if err := process(t, p, msgs[0]); err == nil || driver.Classify(err).Action != driver.ActionRetry {
		t.Errorf("a panic of the fallback: %v", err)
	}
}

func TestHandleBatch(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
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
	})
	noError(t, err)
	msgs := events(16)
	results := p.Process(t.Context(), msgs)
	if got := failedOnes(results); !slices.Equal(got, []int{5}) || driver.Classify(results[5]).Action != driver.ActionDead {
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

// A message of another name ends a call; the order stays the same.
func TestHandleBatchNeighbours(t *testing.T) {
	t.Parallel()
	p, _ := fakeStore(t)
	var trail []string
	err := inboxpgx.HandleBatch(p, conformance.Name, func(_ context.Context, _ pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		trail = append(trail, fmt.Sprintf("%d from %d", len(items), items[0].Value.Number))
		return nil
	})
	noError(t, err)
	if err := inboxpgx.Handle(p, "other", func(_ context.Context, _ pgx.Tx, e conformance.Event) error {
		trail = append(trail, fmt.Sprintf("other %d", e.Number))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	msgs := events(6)
	msgs[2].Name = "other"
	noError(t, errors.Join(p.Process(t.Context(), msgs)...))
	if got := strings.Join(trail, ", "); got != "2 from 0, other 2, 3 from 3" {
		t.Error(got)
	}
}

// A handler's Timeout ends only its own call.
func TestBatchTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, entries := fakeStoreWith(t, inboxpgx.HandlerConfig{Timeout: time.Minute})
		handle(t, p, func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			if e.Number == 1 {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		})
		msgs := events(3)
		results := p.Process(t.Context(), msgs)
		if got := failedOnes(results); !slices.Equal(got, []int{1}) || !driver.Classify(results[1]).Counted {
			t.Errorf("results %v", results)
		}
		if !entries.Seen("a", msgs[0].ID) || entries.Seen("a", msgs[1].ID) || !entries.Seen("a", msgs[2].ID) {
			t.Error("entries of the wrong messages")
		}
	})
}

// A fault of the database is not a message's failure: all are redelivered, uncounted.
func TestBatchUnavailable(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]txretrytest.Fault{
		"cannot begin":            {Point: txretrytest.AtBegin, SQLSTATE: "57P03"},
		"reply to COMMIT is lost": {Point: txretrytest.ReplyLostApplied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _ := fakeStore(t, fault)
			runs := 0
			handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error { runs++; return nil })
			msgs := events(5)
			for _, err := range p.Process(t.Context(), msgs) {
				if f := driver.Classify(err); !f.Unavailable || f.Counted {
					t.Errorf("%v classified %+v", err, f)
				}
			}
			if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil || runs != 5 {
				t.Errorf("%d runs, error %v", runs, err)
			}
		})
	}
}

// If a handler exits its goroutine, every message still gets a result.
func TestBatchGoexit(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"prepare", "handler"} {
		synctest.Test(t, func(t *testing.T) {
			p, _ := fakeStore(t)
			exit := func(at string, e conformance.Event) {
				if at == where && e.Number == 1 {
					runtime.Goexit()
				}
			}
			err := inboxpgx.HandlePrepared(p, conformance.Name,
				func(_ context.Context, e conformance.Event) (int, error) { exit("prepare", e); return 0, nil },
				func(_ context.Context, _ pgx.Tx, e conformance.Event, _ int) error { exit("handler", e); return nil })
			noError(t, err)
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

// A conflict that ends costs no message. A conflict that stays is retried for each message alone.
func TestBatchConflicts(t *testing.T) {
	t.Parallel()
	const attempts = 6 // of a transaction
	conflict := txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	for name, tt := range map[string]struct{ conflicts, runs int }{
		"ends":  {attempts - 1, 3 * attempts},
		"stays": {attempts, 3*attempts + 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p, entries := fakeStore(t, slices.Repeat([]txretrytest.Fault{conflict}, tt.conflicts)...)
				runs := 0
				handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error { runs++; return nil })
				msgs := events(3)
				noError(t, p.Process(t.Context(), msgs)...)
				for _, m := range msgs {
					if !entries.Seen("a", m.ID) {
						t.Errorf("message %s has no entry", m.Body)
					}
				}
				if runs != tt.runs {
					t.Errorf("%d runs, want %d", runs, tt.runs)
				}
			})
		})
	}
}

// hanging handles messages, one of which waits until its context ends.
type hanging struct {
	number int
	gate   chan struct{} // message 0 waits for it

	mu    sync.Mutex
	taken []int // the numbers of the messages that took effect
}

func newHanging(number int) *hanging { return &hanging{number: number, gate: make(chan struct{})} }

func (h *hanging) do(ctx context.Context, tx pgx.Tx, numbers ...int) error {
	for _, n := range numbers {
		switch n {
		case 0:
			<-h.gate
		case h.number:
			<-ctx.Done()
			return ctx.Err()
		}
		txretry.AfterCommit(tx, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.taken = append(h.taken, n)
		})
	}
	return nil
}

// effects returns the sorted numbers of the messages that took effect.
func (h *hanging) effects() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(slices.Values(h.taken))
}

func (h *hanging) register(t *testing.T, s *inboxpgx.Store, many bool) {
	t.Helper()
	if !many {
		handle(t, s, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error { return h.do(ctx, tx, e.Number) })
		return
	}
	err := inboxpgx.HandleBatch(s, conformance.Name, func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		var numbers []int
		for _, item := range items {
			numbers = append(numbers, item.Value.Number)
		}
		return h.do(ctx, tx, numbers...)
	})
	noError(t, err)
}

// others returns the numbers below n except one.
func others(n, but int) (all []int) {
	for i := range n {
		if i != but {
			all = append(all, i)
		}
	}
	return all
}

// consumeHanging runs a consumer on n messages until all have taken effect except the one that hangs, which
// is then the only dead letter. All but the first arrive as one batch.
func consumeHanging(t *testing.T, s *inboxpgx.Store, many bool, n int, timeout time.Duration) {
	t.Helper()
	h := newHanging(n / 2)
	h.register(t, s, many)
	broker := inboxtest.NewBroker()
	var received atomic.Int64
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "orders", Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
		if at == inboxtest.AtReceive && received.Add(1) == int64(n) {
			close(h.gate)
		}
		return inboxtest.OK
	}}, s, inbox.ConsumerConfig{
		Concurrency: 1, Batch: n, HandlerTimeout: timeout, Retry: inbox.RetryPolicy{MaxAttempts: 1}, Logger: slog.New(slog.DiscardHandler),
	})
	noError(t, err)
	msgs := events(n)
	for _, m := range msgs {
		noError(t, broker.Send(t.Context(), m))
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()
	err = broker.Idle(t.Context())
	letters, listed := consumer.DeadLetters().List(t.Context(), inbox.Filter{Limit: n})
	noError(t, errors.Join(err, listed))
	if len(letters) != 1 || letters[0].Message.ID != msgs[h.number].ID {
		t.Errorf("%d dead letters, want the one that hangs", len(letters))
	}
	if got := h.effects(); !slices.Equal(got, others(n, h.number)) {
		t.Errorf("effects of %v", got)
	}
	cancel()
	noError(t, <-ended)
}

// A handler that hangs fails only its own message, and delays the others for minutes at most.
func TestBatch_oneHandlerHangs(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		many bool
		most time.Duration
	}{
		"a call for each": {false, 2 * time.Minute}, // without savepoints, and with them
		"one call":        {true, 11 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, _ := fakeStore(t)
				began := time.Now()
				consumeHanging(t, s, tt.many, 200, time.Minute)
				if took := time.Since(began); took > tt.most {
					t.Errorf("took %v, want %v at most", took, tt.most)
				}
			})
		})
	}
}

// The last message of a divided batch may have no time left: it is tried again, too.
func TestBatch_noTimeLeftForTheLast(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, entries := fakeStore(t, txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "23503"})
		calls := 0
		handle(t, s, func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			if calls++; e.Number == 1 && calls > 2 {
				<-ctx.Done()
			}
			return ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		msgs := events(2)
		results := s.Process(ctx, msgs)
		if f := driver.Classify(results[1]); results[0] != nil || f.Counted || !f.Unavailable || !entries.Seen("a", msgs[0].ID) {
			t.Errorf("results %v", results)
		}
	})
}

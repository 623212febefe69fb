package expirytest_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/expiry/conformance"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/internal/prove/provetest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return newBackend(t) }, synctest.Test)
}

type backend struct {
	manager *txretrytest.Manager
	table   *expirytest.Store
	emit    conformance.Emit // callback of the table, set by Store
	mu      sync.Mutex
	events  map[string]int
}

func newBackend(t *testing.T) *backend {
	t.Helper()
	b := &backend{manager: txretrytest.New(txretrytest.Config{}), events: map[string]int{}}
	b.table = b.store(t, expirytest.Config{Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		if b.emit == nil {
			return nil
		}
		return b.emit(ctx, tx, rows)
	}})
	return b
}

func (b *backend) store(t *testing.T, cfg expirytest.Config) *expirytest.Store {
	t.Helper()
	s, err := expirytest.New(b.manager, cfg)
	must(t, err)
	return s
}

func (b *backend) Store(t *testing.T, emit conformance.Emit) driver.Store {
	t.Helper()
	b.emit = emit
	return b.table
}

func (b *backend) Put(t *testing.T, id, state string, in time.Duration) {
	t.Helper()
	err := b.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return b.table.Put(tx, id, time.Now().Add(in), state) // timing: a deadline of the row
	})
	must(t, err)
}

func (b *backend) State(t *testing.T, id string) string {
	t.Helper()
	_, state, _ := b.table.Get(id)
	return state
}

func (b *backend) Announce(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	add := func(n int) func() {
		return func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events[row.ID] += n
		}
	}
	return txretrytest.Effect(tx, add(1), add(-1))
}

func (b *backend) Fail(_ context.Context, tx pgx.Tx, sqlState string) error {
	return txretrytest.Fail(tx, &pgconn.PgError{Code: sqlState})
}

func (b *backend) Announced(t *testing.T, id string) int {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.events[id]
}

func TestNewReportsEveryViolation(t *testing.T) {
	t.Parallel()
	_, err := expirytest.New(nil, expirytest.Config{Active: func() []expiry.Row { return nil }})
	for _, want := range []string{"transactor", "Expire"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

// A sweeper on the half-hour schedule is woken when a hold commits, and not if it is rolled back.
func TestDueWakesTheSweeper(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(t)
		var swept []time.Time
		holds := b.store(t, expirytest.Config{Emit: func(context.Context, pgx.Tx, []expiry.Row) error {
			swept = append(swept, time.Now())
			return nil
		}})
		sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
		must(t, err)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- sweeper.Run(ctx) }()
		time.Sleep(10 * time.Second)
		hold := func(id string, in time.Duration, fail error) time.Time {
			deadline := time.Now().Add(in)
			err := b.manager.Do(ctx, func(_ context.Context, tx pgx.Tx) error {
				if !holds.Due(tx, deadline) {
					t.Error("Due rejected the transaction")
				}
				return errors.Join(holds.Put(tx, id, deadline, "held"), fail)
			})
			if !errors.Is(err, fail) {
				t.Error(err)
			}
			return deadline
		}
		hold("never", time.Second, errors.New("no"))
		deadline := hold("seat A1", 2*time.Second, nil)
		if holds.Due(nil, deadline) {
			t.Error("Due accepted a foreign transaction")
		}
		time.Sleep(5 * time.Second)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if len(swept) != 1 || swept[0].Before(deadline) || swept[0].Sub(deadline) > time.Second {
			t.Errorf("expired at %v, want %v", swept, deadline)
		}
	})
}

// A sweeper may have called Look before it receives wake-ups. So Background wakes it once with an unknown time, and
// again for a row made at that moment.
func TestBackground_wakesForEarlierRows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		holds := newBackend(t).store(t, expirytest.Config{})
		deadline := time.Now().Add(time.Minute)
		var told []time.Time
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go holds.Background(ctx, func(at time.Time) {
			told = append(told, at)
			if at.IsZero() {
				holds.Wake(deadline)
			}
		})
		synctest.Wait()
		if len(told) != 2 || !told[0].IsZero() || !told[1].Equal(deadline) {
			t.Errorf("woken for %v, want an unknown time and %v", told, deadline)
		}
	})
}

var quiet = slog.New(slog.DiscardHandler)

type emit = func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

func newHolds(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	messages, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, messages.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `
		CREATE TABLE holds (id text PRIMARY KEY, expires_at timestamptz NOT NULL, status text NOT NULL);
		CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
		CREATE TABLE freed (seat text NOT NULL)`, pgx.QueryExecModeSimpleProtocol)
	must(t, err)
	return pool
}

func proveSweep(t prove.TB, pool *pgxpool.Pool, emit func(own *pgxpool.Pool, mails *atomic.Int64) emit) {
	var mails atomic.Int64
	expirytest.Prove(t, txretrytest.Proof{
		Pool: pool, Effects: func() int { return int(mails.Load()) },
		Reset: `TRUNCATE holds, freed, holdfast_outbox;
			INSERT INTO holds VALUES ('A1', '2026-01-01', 'held'), ('A2', '2026-01-02', 'held'), ('A3', 'infinity', 'held')`,
		Rows: []string{"TABLE holds", "TABLE freed", "SELECT name FROM holdfast_outbox"},
	}, func(own *pgxpool.Pool) (*expirypgx.Store, error) {
		manager, err := txretry.New(own, txretry.Config{Logger: quiet})
		if err != nil {
			return nil, err
		}
		return expirypgx.New(manager, "holds", expirypgx.Config{Emit: emit(own, &mails), Logger: quiet})
	})
}

func free(ctx context.Context, db interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}, rows []expiry.Row,
) error {
	var b pgx.Batch
	for _, row := range rows {
		b.Queue("INSERT INTO freed (seat) VALUES ($1)", row.ID)
	}
	return db.SendBatch(ctx, &b).Close()
}

func same(e emit) func(*pgxpool.Pool, *atomic.Int64) emit {
	return func(*pgxpool.Pool, *atomic.Int64) emit { return e }
}

func freeInTx(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error { return free(ctx, tx, rows) }

// A correct sweep passes, with messages too.
func TestProve(t *testing.T) {
	t.Parallel()
	for name, emit := range map[string]func(*pgxpool.Pool, *atomic.Int64) emit{
		"statements": same(freeInTx),
		"messages": func(own *pgxpool.Pool, _ *atomic.Int64) emit {
			store, err := outboxpgx.New(own, outboxpgx.Config{Logger: quiet})
			return expirypgx.Messages(store.Write, func(row expiry.Row) (outbox.Message, error) {
				if err != nil {
					return outbox.Message{}, err
				}
				return outbox.NewMessage("hold.expired", row.ID)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proveSweep(t, newHolds(t), emit)
		})
	}
}

// Each mistake is found, and the error names it.
func TestProveCatches(t *testing.T) {
	t.Parallel()
	type planted struct {
		emit func(own *pgxpool.Pool, mails *atomic.Int64) emit
		want []string
	}
	for name, plant := range map[string]planted{
		"a write on the pool": {func(own *pgxpool.Pool, _ *atomic.Int64) emit {
			return func(ctx context.Context, _ pgx.Tx, rows []expiry.Row) error { return free(ctx, own, rows) }
		}, []string{"killed after", "+ seat=A1", "It wrote outside of its transaction", "INSERT INTO freed"}},
		"a side effect": {func(_ *pgxpool.Pool, mails *atomic.Int64) emit {
			return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
				mails.Add(int64(len(rows)))
				return free(ctx, tx, rows)
			}
		}, []string{"killed before", "Proof.Effects counts 4, 2 after"}},
		"an error swallowed": {same(func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			_ = free(ctx, tx, rows)
			return nil
		}), []string{"refused by the server as too slow", "it swallowed the error"}},
		"an error swallowed in a savepoint": {same(func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if free(ctx, sp, rows) != nil {
				return sp.Rollback(ctx)
			}
			return sp.Commit(ctx)
		}), []string{"refused by the server as too slow", "- seat=A1", "swallowed the error, in a savepoint"}},
		"Emit that fails": {same(func(context.Context, pgx.Tx, []expiry.Row) error { return errors.New("no such seat") }),
			[]string{"nothing fails", "no such seat"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newHolds(t)
			provetest.Caught(t, func(t prove.TB) { proveSweep(t, pool, plant.emit) }, plant.want...)
		})
	}
}

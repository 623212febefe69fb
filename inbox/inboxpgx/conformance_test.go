package inboxpgx_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestProcessorOnPostgres(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{"", pgx.ReadCommitted} {
		t.Run("isolation "+string(isolation), func(t *testing.T) {
			t.Parallel()
			conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture { return postgres(t, newPool(t), isolation) }})
		})
	}
}

func TestProcessorBehindPgBouncer(t *testing.T) {
	testenv.Nightly(t, "TestQueryExecModes runs what a pooler can change")
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture { return postgres(t, newPooled(t), "") }})
}

func TestProcessorOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{Bubble: true, New: fake})
}

func TestEntriesOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestEntries(t, conformance.EntriesBackend{New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
		manager := newManager(t, newPool(t))
		return manager, newStore(t, manager, "a", inboxpgx.Config{}).Entries()
	}})
}

func TestEntriesOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestEntries(t, conformance.EntriesBackend{Bubble: true, New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
		return txretrytest.New(txretrytest.Config{}), memory.NewEntries(time.Hour)
	}})
}

// newPool returns a pool on a schema that has the inbox table and one for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	createTables(t, pool)
	return pool
}

// newPooled is newPool behind a PgBouncer.
func newPooled(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.NewPooled(t)
	createTables(t, pool)
	return pool
}

func createTables(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	noError(t, newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Migrate(t.Context()))
	exec(t, pool, `CREATE TABLE effects (consumer text, number int, message_id uuid)`)
}

func newManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{})
	noError(t, err)
	return manager
}

func newStore(t *testing.T, transactor txretry.Transactor, consumer string, cfg inboxpgx.Config) *inboxpgx.Store {
	t.Helper()
	p, err := inboxpgx.New(transactor, consumer, cfg)
	noError(t, err)
	return p
}

func handle(t *testing.T, p *inboxpgx.Store, fn func(ctx context.Context, tx pgx.Tx, e conformance.Event) error) {
	t.Helper()
	noError(t, inboxpgx.Handle(p, conformance.Name, fn))
}

func insertEffect(ctx context.Context, tx pgx.Tx, consumer string, number int) error {
	m, _ := inbox.FromContext(ctx)
	_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1, $2, $3)`, consumer, number, m.ID)
	return err
}

func postgres(t *testing.T, pool *pgxpool.Pool, isolation pgx.TxIsoLevel) conformance.Fixture {
	t.Helper()
	manager := newManager(t, pool)
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newStore(t, manager, consumer, inboxpgx.Config{Isolation: isolation})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				if err := insertEffect(ctx, tx, consumer, e.Number); err != nil {
					return err
				}
				return h(ctx, e)
			})
			return p
		},
		Effects: func(t *testing.T, consumer string, number int) (n int) {
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE consumer = $1 AND number = $2`, consumer, number).Scan(&n)
			noError(t, err)
			return n
		},
	}
}

type effect struct {
	consumer string
	number   int
}

func fake(*testing.T) conformance.Fixture {
	manager := txretrytest.New(txretrytest.Config{})
	entries := memory.NewEntries(time.Hour)
	var mu sync.Mutex
	effects := map[effect]int{}
	add := func(e effect, n int) {
		mu.Lock()
		defer mu.Unlock()
		effects[e] += n
	}
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newStore(t, manager, consumer, inboxpgx.Config{Entries: entries})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				key := effect{consumer, e.Number}
				if err := txretrytest.Effect(tx, func() { add(key, 1) }, func() { add(key, -1) }); err != nil {
					return err
				}
				return h(ctx, e)
			})
			return p
		},
		Effects: func(_ *testing.T, consumer string, number int) int {
			mu.Lock()
			defer mu.Unlock()
			return effects[effect{consumer, number}]
		},
	}
}

func TestLedgerOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestLedger(t, func(t *testing.T) func(string) driver.Ledger {
		manager := newManager(t, newPool(t))
		return func(consumer string) driver.Ledger { return newStore(t, manager, consumer, inboxpgx.Config{}).Ledger() }
	})
}

func TestEntriesAndLedgerBehindPgBouncer(t *testing.T) {
	testenv.Nightly(t, "TestQueryExecModes runs what a pooler can change")
	t.Parallel()
	t.Run("entries", func(t *testing.T) {
		t.Parallel()
		conformance.TestEntries(t, conformance.EntriesBackend{New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
			manager := newManager(t, newPooled(t))
			return manager, newStore(t, manager, "a", inboxpgx.Config{}).Entries()
		}})
	})
	t.Run("ledger", func(t *testing.T) {
		t.Parallel()
		conformance.TestLedger(t, func(t *testing.T) func(string) driver.Ledger {
			manager := newManager(t, newPooled(t))
			return func(consumer string) driver.Ledger { return newStore(t, manager, consumer, inboxpgx.Config{}).Ledger() }
		})
	})
}

func TestLedgerOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestLedger(t, func(*testing.T) func(string) driver.Ledger { return memory.NewEntries(time.Hour).Ledger })
}

func TestParkingOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestParking(t, func(t *testing.T) func(string) driver.Parking {
		manager := newManager(t, newPool(t))
		return func(consumer string) driver.Parking {
			return newStore(t, manager, consumer, inboxpgx.Config{}).Parking(true)
		}
	})
}

func TestParkingOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestParking(t, func(*testing.T) func(string) driver.Parking {
		return memory.NewEntries(time.Hour).Parking
	})
}

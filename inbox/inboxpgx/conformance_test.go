package inboxpgx_test

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestProcessorOnPostgres(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{"", pgx.ReadCommitted} {
		t.Run("isolation "+string(isolation), func(t *testing.T) {
			t.Parallel()
			conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture { return postgres(t, isolation) }})
		})
	}
}

func TestProcessorOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{Bubble: true, New: fake})
}

func TestDedupOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestDedup(t, conformance.DedupBackend{New: func(t *testing.T) (txretry.Transactor, inboxpgx.Dedup) {
		table, err := inboxpgx.NewTable(inboxpgx.SchemaConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return newManager(t, newPool(t)), table
	}})
}

func TestDedupOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestDedup(t, conformance.DedupBackend{Bubble: true, New: func(t *testing.T) (txretry.Transactor, inboxpgx.Dedup) {
		return txretrytest.New(txretrytest.Config{}), inboxtest.NewDedup()
	}})
}

// newPool returns a pool on a schema that has the inbox table and one for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	createTables(t, pool)
	return pool
}

func createTables(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if err := inboxpgx.Migrate(t.Context(), pool, inboxpgx.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	_, err := pool.Exec(t.Context(), `CREATE TABLE effects (consumer text, number int, message_id uuid)`)
	if err != nil {
		t.Fatal(err)
	}
}

func newManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return manager
}

func newProcessor(t *testing.T, transactor txretry.Transactor, cfg inboxpgx.Config) *inboxpgx.Processor {
	t.Helper()
	p, err := inboxpgx.NewProcessor(transactor, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func handle(t *testing.T, p *inboxpgx.Processor, fn func(ctx context.Context, tx pgx.Tx, e conformance.Event) error, cfg inboxpgx.HandlerConfig) {
	t.Helper()
	if err := inboxpgx.Handle(p, conformance.Name, fn, cfg); err != nil {
		t.Fatal(err)
	}
}

func insertEffect(ctx context.Context, tx pgx.Tx, consumer string, number int) error {
	m, _ := inbox.FromContext(ctx)
	_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1, $2, $3)`, consumer, number, m.ID)
	return err
}

func postgres(t *testing.T, isolation pgx.TxIsoLevel) conformance.Fixture {
	t.Helper()
	pool := newPool(t)
	manager := newManager(t, pool)
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newProcessor(t, manager, inboxpgx.Config{Consumer: consumer, Isolation: isolation})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				if err := insertEffect(ctx, tx, consumer, e.Number); err != nil {
					return err
				}
				return h(ctx, e)
			}, inboxpgx.HandlerConfig{})
			return p
		},
		Effects: func(t *testing.T, consumer string, number int) (n int) {
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE consumer = $1 AND number = $2`, consumer, number).Scan(&n)
			if err != nil {
				t.Fatal(err)
			}
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
	dedup := inboxtest.NewDedup()
	var mu sync.Mutex
	effects := map[effect]int{}
	add := func(e effect, n int) {
		mu.Lock()
		defer mu.Unlock()
		effects[e] += n
	}
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newProcessor(t, manager, inboxpgx.Config{Consumer: consumer, Dedup: dedup})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				key := effect{consumer, e.Number}
				if err := txretrytest.Effect(tx, func() { add(key, 1) }, func() { add(key, -1) }); err != nil {
					return err
				}
				return h(ctx, e)
			}, inboxpgx.HandlerConfig{})
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
	conformance.TestLedger(t, func(t *testing.T) driver.Ledger {
		ledger, err := inboxpgx.NewLedger(newPool(t), inboxpgx.SchemaConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return ledger
	})
}

func TestLedgerOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestLedger(t, func(*testing.T) driver.Ledger { return inboxtest.NewLedger() })
}

package idempotencytest_test

import (
	"context"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var backend = conformance.Backend{
	New:    func(*testing.T) driver.Store { return idempotencytest.NewStore() },
	Bubble: true,
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend)
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend)
}

// effects counts in memory, as part of fake transactions.
type effects struct {
	mu    sync.Mutex
	count map[string]int
}

func (e *effects) add(name string, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.count[name] += n
}

func (e *effects) Add(_ context.Context, tx pgx.Tx, name string) error {
	return txretrytest.Effect(tx, func() { e.add(name, 1) }, func() { e.add(name, -1) })
}

func (e *effects) Count(_ *testing.T, name string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count[name]
}

var databases = conformance.RecordsBackend{
	Bubble: true,
	New: func(*testing.T) conformance.Database {
		e := &effects{count: map[string]int{}}
		return conformance.Database{
			Transactor: txretrytest.New(txretrytest.Config{}),
			Records:    idempotencytest.NewRecords(),
			Add:        e.Add,
			Count:      e.Count,
		}
	},
}

func TestRecords(t *testing.T) {
	t.Parallel()
	conformance.TestRecords(t, databases)
}

func TestDo(t *testing.T) {
	t.Parallel()
	conformance.TestDo(t, databases)
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

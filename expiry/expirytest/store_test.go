package expirytest_test

import (
	"context"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/expiry/expirytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return newBackend() }, synctest.Test)
}

type backend struct {
	manager *txretrytest.Manager
	table   *expirytest.Table
	mu      sync.Mutex
	events  map[string]int
}

func newBackend() *backend {
	return &backend{
		manager: txretrytest.New(txretrytest.Config{}),
		table:   expirytest.NewTable(),
		events:  map[string]int{},
	}
}

func (b *backend) Store(t *testing.T, emit conformance.Emit) driver.Store {
	t.Helper()
	s, err := expirytest.NewStore(b.manager, expirytest.Config{Active: b.table.Active, Expire: b.table.Expire, Emit: emit})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (b *backend) Put(t *testing.T, id, state string, in time.Duration) {
	t.Helper()
	err := b.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return b.table.Put(tx, id, time.Now().Add(in), state)
	})
	if err != nil {
		t.Fatal(err)
	}
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

func TestNewStoreRefusesWhatIsMissing(t *testing.T) {
	t.Parallel()
	if _, err := expirytest.NewStore(nil, expirytest.Config{}); err == nil {
		t.Error("accepted a store without anything")
	}
}

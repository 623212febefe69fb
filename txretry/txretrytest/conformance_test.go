package txretrytest_test

import (
	"context"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest/conformance"
)

var _ txretry.Transactor = (*txretrytest.Manager)(nil)

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.RunBubble(t, newBackend)
}

// counter is a fake store.
type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) add(delta int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += delta
}

func (c *counter) value() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *counter) Add(_ context.Context, tx pgx.Tx, delta int) error {
	return txretrytest.Effect(tx, func() { c.add(delta) }, func() { c.add(-delta) })
}

func newBackend(*testing.T) conformance.Backend {
	var c counter
	return conformance.Backend{
		New: func(cfg txretry.Config) txretry.Transactor {
			return txretrytest.New(txretrytest.Config{Retry: cfg})
		},
		Add:  c.Add,
		Read: func(context.Context) (int, error) { return c.value(), nil },
		Fail: func(_ context.Context, tx pgx.Tx, sqlstate string) error {
			return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: sqlstate, Message: "test"})
		},
		FailAtCommit: func(_ context.Context, tx pgx.Tx, sqlstate string) error {
			return txretrytest.EffectAtCommit(tx, func() error { return &pgconn.PgError{Severity: "ERROR", Code: sqlstate, Message: "test"} }, nil, nil)
		},
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

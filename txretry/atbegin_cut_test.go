package txretry_test

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// severed is a connection that passes on so many bytes of the server's, and then is lost.
type severed struct {
	net.Conn
	left *atomic.Int64
}

func (c severed) Read(p []byte) (int, error) {
	left := c.left.Load()
	if left <= 0 {
		_ = c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), left)])
	c.left.Add(-int64(n))
	return n, err
}

// Wherever within its answers the connection is lost, AtBegin and fn have both taken effect
// or neither has, and Do says which, as far as anybody can know.
func TestAtBeginConnectionLost(t *testing.T) {
	t.Parallel()
	modes := []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement}
	if testenv.Rounds(t) > 0 {
		modes = append(modes, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol)
	}
	for _, mode := range modes {
		direct := newCounter(t)
		var left atomic.Int64
		cfg := direct.Config()
		cfg.MaxConns = 1
		cfg.ConnConfig.DefaultQueryExecMode = mode
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return severed{conn, &left}, err
		}
		left.Store(math.MaxInt64)
		connectionLostWithin(t, direct, openPool(t, cfg), &left)
	}
}

func connectionLostWithin(t *testing.T, direct, pool *pgxpool.Pool, left *atomic.Int64) {
	t.Helper()
	m := newManager(t, pool, txretry.Config{})
	told, want := 0, 0
	run := func() error {
		return m.DoWith(t.Context(), txretry.Options{AtBegin: atBegin(&told)}, func(ctx context.Context, tx pgx.Tx) error {
			return add(ctx, tx, 1)
		})
	}
	lost := 0
	for passed := int64(0); ; passed += 11 {
		left.Store(math.MaxInt64)
		if err := run(); err != nil { // statements are prepared
			t.Fatal(err)
		}
		want += 2
		left.Store(passed)
		err := run()
		n := settledCounter(t, direct)
		var unknown *txretry.CommitUnknownError
		var unavailable *txretry.UnavailableError
		if err != nil && !errors.As(err, &unknown) && !errors.As(err, &unavailable) {
			t.Errorf("%d bytes: error %v, want that the database is unavailable", passed, err)
		}
		switch {
		case err == nil:
			if n != want+2 || lost < 10 {
				t.Errorf("%d bytes: counter %d, want %d; lost %d times", passed, n, want+2, lost)
			}
			return
		case n != want && (n != want+2 || !errors.As(err, &unknown)):
			t.Fatalf("%d bytes: counter %d, before %d; error %v", passed, n, want, err)
		}
		want, lost = n, lost+1
	}
}

// settledCounter waits for a transaction that nobody hears of any more.
func settledCounter(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), "select n from counter where id = 1 for update").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// When Done panics, its transaction is rolled back and the connection is sound.
func TestAtBeginDonePanics(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	m := newManager(t, direct, txretry.Config{})
	opts := txretry.Options{AtBegin: driver.Statement{SQL: addSQL, Args: []any{1}}}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		broken := opts
		broken.AtBegin.Done = func(pgconn.CommandTag) { panic("broken") }
		_ = m.DoWith(t.Context(), broken, func(context.Context, pgx.Tx) error { t.Error("fn ran"); return nil })
	}()
	wantCounter(t, direct, 0)
	if err := m.DoWith(t.Context(), opts, func(context.Context, pgx.Tx) error { return nil }); err != nil {
		t.Error(err)
	}
	wantCounter(t, direct, 1)
}

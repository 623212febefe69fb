package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// preparedPool returns a pool on the server that is as it should be.
func preparedPool(t *testing.T, server *testenv.Server, conns int32) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = conns
	txretry.PreparePool(cfg)
	return openPool(t, cfg)
}

// wantFindings checks that there is one finding for each of the texts.
func wantFindings(t *testing.T, m *txretry.Manager, texts ...string) {
	t.Helper()
	err := m.Check(t.Context())
	if len(texts) == 0 {
		if err != nil {
			t.Errorf("findings where there should be none: %v", err)
		}
		return
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != len(texts) {
		t.Fatalf("want %d findings: %v", len(texts), err)
	}
	for i, text := range texts {
		found := joined.Unwrap()[i]
		finding, ok := found.(interface{ Mend() string })
		if !ok || finding.Mend() == "" || !strings.HasPrefix(found.Error(), "txretry: ") || !strings.Contains(found.Error(), text) {
			t.Errorf("finding %v, want one about %s", found, text)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	pool := preparedPool(t, server, 4)
	m := newManager(t, pool, txretry.Config{})
	wantFindings(t, m)
	wantFindings(t, newManager(t, pool, txretry.Config{Isolation: pgx.ReadCommitted}))

	raw, err := pgxpool.New(t.Context(), server.URL()+"&pool_max_conns=1000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(raw.Close)
	wantFindings(t, newManager(t, raw, txretry.Config{}), "1000 connections", "bound how long it connects")

	var data string
	if err := pool.QueryRow(t.Context(), "show data_directory").Scan(&data); err != nil {
		t.Fatal(err)
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	wantFindings(t, m, "hot standby")
}

func TestCheckOfMisSetServer(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres, "-c", "max_pred_locks_per_transaction=64", "-c", "default_transaction_read_only=on")
	pool := preparedPool(t, server, 4)
	const locks, readOnly = "max_pred_locks_per_transaction is 64", "default_transaction_read_only"
	wantFindings(t, newManager(t, pool, txretry.Config{}), readOnly, locks)
	wantFindings(t, newManager(t, pool, txretry.Config{Isolation: pgx.ReadCommitted}), readOnly)
}

// Check asks another connection where one falls silent.
func TestCheckOnSilentConnection(t *testing.T) {
	t.Parallel()
	_, pool, proxy := behindProxy(t, 1, addOne)
	proxy.SilenceOn(testenv.Silence{On: "server_version_num"})
	err := newManager(t, pool, txretry.Config{}).Check(soon(t)) // it may find something
	if errors.Is(err, driver.ErrSilent) || proxy.Silenced() != 1 {
		t.Errorf("%v, %d connections silent", err, proxy.Silenced())
	}
}

// A server that is silent is an error, in time.
func TestCheckOfSilentServer(t *testing.T) {
	t.Parallel()
	_, pool, proxy := behindProxy(t, 1, addOne)
	m := newManager(t, pool, txretry.Config{})
	m.SetWaits(2*time.Second, time.Second)
	proxy.Pause()
	if err := m.Check(soon(t)); err == nil {
		t.Error("no error")
	}
	proxy.Heal()
}

// The server's table of predicate locks is full: an answer that names the setting, and no retry,
// which would need the same table.
func TestOutOfPredicateLocks(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres, "-c", "max_pred_locks_per_transaction=10", "-c", "max_connections=12", "-c", "superuser_reserved_connections=0")
	pool := preparedPool(t, server, 8)
	exec(t, pool, "create table seat (id int primary key, state int); insert into seat select g, 0 from generate_series(1, 50000) g; analyze seat")
	m := newManager(t, pool, txretry.Config{})
	look := func(ctx context.Context, tx pgx.Tx, id int) error {
		return tx.QueryRow(ctx, "select state from seat where id = $1", id).Scan(new(int))
	}
	calls := 0
	err := m.Do(soon(t), func(ctx context.Context, open pgx.Tx) error {
		if err := look(ctx, open, 1); err != nil {
			return err
		}
		for n := range 50_000 { // the locks of each of these are kept as long as fn has not returned
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				_, err := tx.Exec(ctx, "update seat set state = 1 where id = $1", n)
				return errors.Join(err, look(ctx, tx, 1+n*31%50_000), look(ctx, tx, 1+n*57%50_000))
			})
			if err != nil {
				if calls != n+1 {
					t.Errorf("%d attempts for %d calls", calls, n+1)
				}
				return err
			}
		}
		return fmt.Errorf("the table took the locks of %d transactions", calls)
	})
	wantUnavailable(t, err, "fn")
	wantSQLSTATE(t, err, "53200")
	if !strings.Contains(err.Error(), "max_pred_locks_per_transaction") {
		t.Errorf("error %q does not name the setting", err)
	}
}

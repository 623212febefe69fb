package txretry_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// atBegin runs a look at the counter, adds 1, and counts the calls of Done.
func atBegin(told *int) driver.Statement {
	n := 0
	return driver.Statement{
		SQL: addSQL, Args: []any{1}, Done: func(tag pgconn.CommandTag) { *told += int(tag.RowsAffected()) },
		Look: lookAt(1, &n),
	}
}

// lookAt sets n to -1 if there is no such counter.
func lookAt(id int, n *int) *driver.Look {
	return &driver.Look{SQL: "select n from counter where id = $1", Args: []any{id}, Read: func(row pgx.Row) error {
		err := row.Scan(n)
		if errors.Is(err, pgx.ErrNoRows) {
			*n, err = -1, nil
		}
		return err
	}}
}

// A look reads committed rows, and is not a read of the transaction.
func TestAtBeginLooks(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for _, m := range []*txretry.Manager{m, newManager(t, m.Pool(), txretry.Config{XactStatus: true})} {
			if _, err := pool.Exec(t.Context(), "update counter set n = 7"); err != nil {
				t.Fatal(err)
			}
			for id, want := range map[int]int{1: 7, 99: -1} {
				seen, calls := 0, 0
				opts := txretry.Options{AtBegin: driver.Statement{SQL: "select", Look: lookAt(id, &seen)}}
				err := m.DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
					if calls++; seen != want {
						t.Errorf("counter %d: %d; want %d", id, seen, want)
					}
					seen = 0
					if calls == 1 {
						return &pgconn.PgError{Code: "40001"}
					}
					var level string
					var reads int
					err := tx.QueryRow(ctx, `select current_setting('transaction_isolation'),
						(select count(*) from pg_locks where pid = pg_backend_pid() and mode = 'SIReadLock')`).Scan(&level, &reads)
					if level != "serializable" || reads != 0 {
						t.Errorf("%s, %d reads", level, reads)
					}
					return err
				})
				if err != nil || calls != 2 {
					t.Errorf("counter %d: error %v after %d calls", id, err, calls)
				}
			}
		}
	})
}

// A failed look is a failed BEGIN, and leaves the connection usable.
func TestAtBeginLookFails(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		boom := errors.New("boom")
		for _, m := range []*txretry.Manager{m, newManager(t, m.Pool(), txretry.Config{XactStatus: true})} {
			for name, look := range map[string]*driver.Look{
				"refused": {SQL: "select 1", Read: func(row pgx.Row) error { return errors.Join(row.Scan(new(int)), boom) }},
				"missing": {SQL: "select 1 from missing", Read: func(row pgx.Row) error { return row.Scan(new(int)) }},
			} {
				err := m.DoWith(t.Context(), txretry.Options{AtBegin: driver.Statement{SQL: addSQL, Args: []any{1}, Look: look}}, func(context.Context, pgx.Tx) error {
					t.Error("fn ran")
					return nil
				})
				if name == "missing" {
					wantSQLSTATE(t, err, "42P01")
				} else if !errors.Is(err, boom) {
					t.Errorf("error %v", err)
				}
			}
			if err := m.Do(t.Context(), addOne); err != nil {
				t.Error(err)
			}
		}
		wantCounter(t, pool, 2)
	})
}

func TestAtBegin(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for name, opts := range map[string]txretry.Options{
			"in one pipeline": {},
			"read committed":  {Isolation: pgx.ReadCommitted},
			"with its id":     {},
		} {
			m := m
			if name == "with its id" { // the id is read before the first statement
				m = newManager(t, m.Pool(), txretry.Config{XactStatus: true})
			}
			told, calls := 0, 0
			opts.AtBegin = atBegin(&told)
			err := m.DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
				if calls++; told != calls {
					t.Errorf("%s: told %d times before call %d", name, told, calls)
				}
				var level, bound string
				if err := tx.QueryRow(ctx, "select current_setting('transaction_isolation'), current_setting('lock_timeout')").Scan(&level, &bound); err != nil {
					return err
				}
				if level != cmp.Or(string(opts.Isolation), "serializable") || bound != "8s" {
					t.Errorf("%s: %s, lock_timeout %s", name, level, bound)
				}
				if calls == 1 {
					return &pgconn.PgError{Code: "40001"}
				}
				return nil
			})
			if err != nil || calls != 2 {
				t.Errorf("%s: error %v after %d calls", name, err, calls)
			}
		}
		wantCounter(t, pool, 3)
	})
}

// The lock timeout applies to the first statement already.
func TestAtBeginWaitsForALock(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		other, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := add(t.Context(), other, 10); err != nil {
			t.Fatal(err)
		}
		told := 0
		opts := txretry.Options{LockTimeout: 10 * time.Millisecond, MaxAttempts: 2, AtBegin: atBegin(&told)}
		err = m.DoWith(t.Context(), opts, func(context.Context, pgx.Tx) error { return nil })
		var timeout *txretry.LockTimeoutError
		if !errors.As(err, &timeout) || len(timeout.Attempts) != 2 || timeout.Attempts[0].Phase != "begin" || told != 0 {
			t.Errorf("error %v, told %d times", err, told)
		}
		if err := other.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := m.DoWith(t.Context(), opts, func(context.Context, pgx.Tx) error { return nil }); err != nil || told != 1 {
			t.Errorf("afterwards: error %v, told %d times", err, told)
		}
		wantCounter(t, pool, 11)
	})
}

// The reply to BEGIN comes after the first statement. Here that statement waits for longer than the time limit of
// BEGIN and its doublings. Finally it succeeds all the same.
func TestAtBeginWaitsForLong(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{Logger: quiet})
	m.SetWaits(time.Minute, 20*time.Millisecond)
	calls := 0
	opts := txretry.Options{MaxAttempts: 1, AtBegin: driver.Statement{SQL: "select pg_sleep(0.4)"}}
	err := m.DoWith(t.Context(), opts, func(context.Context, pgx.Tx) error {
		calls++
		return nil
	})
	if err != nil || calls != 1 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

func TestAtBeginFails(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for sql, code := range map[string]string{
			"insert into counter values (1, 0)": "23505",
			"insert into missing values (1)":    "42P01",
			addSQL:                              "", // its argument is missing
		} {
			err := m.DoWith(t.Context(), txretry.Options{AtBegin: driver.Statement{SQL: sql}}, func(context.Context, pgx.Tx) error {
				t.Error("fn ran")
				return nil
			})
			if err == nil {
				t.Errorf("%s: no error", sql)
			}
			if code != "" {
				wantSQLSTATE(t, err, code)
			}
		}
		told := 0
		err := m.DoWith(t.Context(), txretry.Options{AtBegin: atBegin(&told)}, func(context.Context, pgx.Tx) error { return nil })
		if err != nil || told != 1 {
			t.Errorf("afterwards: error %v, told %d times", err, told)
		}
		wantCounter(t, pool, 1)
	})
}

// fn does not run outside a transaction.
func TestAtBeginEndsTheTransaction(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, _ *pgxpool.Pool) {
		for _, sql := range []string{"rollback", "commit"} {
			err := m.DoWith(t.Context(), txretry.Options{AtBegin: driver.Statement{SQL: sql}}, func(context.Context, pgx.Tx) error {
				t.Error("fn ran")
				return nil
			})
			if !errors.Is(err, txretry.ErrManaged) {
				t.Errorf("%s: error %v", sql, err)
			}
		}
	})
}

func TestAtBeginRefused(t *testing.T) {
	t.Parallel()
	m := newManager(t, newCounter(t), txretry.Config{})
	fn := func(context.Context, pgx.Tx) error { return nil }
	for _, st := range []driver.Statement{{Args: []any{1}}, {Look: &driver.Look{}}} {
		err := m.DoWith(t.Context(), txretry.Options{AtBegin: st}, fn)
		if err == nil || !strings.Contains(err.Error(), "AtBegin has no SQL") {
			t.Errorf("without SQL: error %v", err)
		}
	}
	err := m.Do(t.Context(), func(ctx context.Context, _ pgx.Tx) error {
		return m.DoWith(ctx, txretry.Options{Savepoint: true, AtBegin: driver.Statement{SQL: "select"}}, fn)
	})
	if err == nil || !strings.Contains(err.Error(), "no BEGIN") {
		t.Errorf("nested: error %v", err)
	}
}

// severed is a connection that is lost after a number of bytes from the server.
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

// Wherever the connection is lost within the replies, either both AtBegin and fn have taken effect, or neither. Do
// reports which, if this can be known.
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
		if err := run(); err != nil { // prepares the statements
			t.Fatal(err)
		}
		want += 2
		left.Store(passed)
		err := run()
		n := settledCounter(t, direct)
		var unknown *txretry.CommitUnknownError
		var unavailable *txretry.UnavailableError
		if err != nil && !errors.As(err, &unknown) && !errors.As(err, &unavailable) {
			t.Errorf("%d bytes: error %v, want an unavailable database", passed, err)
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

// settledCounter waits for a transaction whose connection is lost.
func settledCounter(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), "select n from counter where id = 1 for update").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// If Done panics, its transaction is rolled back and the connection stays usable.
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

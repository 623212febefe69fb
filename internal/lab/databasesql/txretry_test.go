package databasesql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	inboxconformance "github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/txretry/conformance"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

// tables has a counter, and a table that makes COMMIT fail with the inserted SQLSTATE.
const tables = `
	create table counter (id int primary key, n int not null);
	insert into counter values (1, 0);
	create table failure (sqlstate text);
	create function fail() returns trigger language plpgsql as $$ begin raise exception 'test' using errcode = new.sqlstate; end $$;
	create constraint trigger fail after insert on failure deferrable initially deferred for each row execute function fail()`

// TestConformance: a manager keeps its promises over database/sql.
func TestConformance(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, one *fixture) {
		conformance.Run(t, func(t *testing.T) conformance.Backend {
			f := setup(t, one.driver)
			f.exec(t, tables)
			return conformance.Backend{
				New: func(cfg txretry.Config) txretry.Transactor { return f.manager(t, cfg) },
				Read: func(ctx context.Context) (n int, err error) {
					err = f.pool.QueryRow(ctx, "select n from counter where id = 1").Scan(&n)
					return n, err
				},
				Add: func(ctx context.Context, tx pgx.Tx, delta int) error {
					_, err := tx.Exec(ctx, "update counter set n = n + $1 where id = 1", delta)
					return err
				},
				Fail: func(ctx context.Context, tx pgx.Tx, sqlstate string) error {
					_, err := tx.Exec(ctx, raise(sqlstate))
					return err
				},
				FailAtCommit: func(ctx context.Context, tx pgx.Tx, sqlstate string) error {
					_, err := tx.Exec(ctx, "insert into failure values ($1)", sqlstate)
					return err
				},
			}
		})
	})
}

func raise(sqlstate string) string {
	return fmt.Sprintf("do $$ begin raise exception 'test' using errcode = '%s'; end $$", sqlstate)
}

const addSQL = "update counter set n = n + 1 where id = 1"

func add(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, addSQL)
	return err
}

// Failures of the *sql.Tx itself appear in the error of fn.
func TestErrorsOfTheTx(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fail   func(ctx context.Context, tx *sql.Tx, attempt int) error
		calls  int
		state  string // in the error of Do
		is     error
		commit bool
	}{
		"a conflict": {func(ctx context.Context, tx *sql.Tx, attempt int) error {
			if attempt > 1 {
				return nil
			}
			_, err := tx.ExecContext(ctx, raise("40001"))
			return fmt.Errorf("wrapped: %w", err)
		}, 2, "", nil, true},
		"a conflict at COMMIT": {func(ctx context.Context, tx *sql.Tx, attempt int) error {
			if attempt > 1 {
				return nil
			}
			_, err := tx.ExecContext(ctx, "insert into failure values ('40001')")
			return err
		}, 2, "", nil, true},
		"no conflict": {func(ctx context.Context, tx *sql.Tx, _ int) error {
			_, err := tx.ExecContext(ctx, raise("23505"))
			return err
		}, 1, "23505", nil, false},
		"ignored": {func(ctx context.Context, tx *sql.Tx, _ int) error {
			_, _ = tx.ExecContext(ctx, raise("40001"))
			return nil
		}, 1, "", pgx.ErrTxCommitRollback, false},
		"rows left open, which database/sql closes": {func(ctx context.Context, tx *sql.Tx, _ int) error {
			rows, err := tx.QueryContext(ctx, "select generate_series(1, 100000)")
			if err == nil {
				rows.Next()
			}
			return err
		}, 1, "", nil, true},
		"rows left open, with an error to come": {func(ctx context.Context, tx *sql.Tx, _ int) error {
			_, err := tx.QueryContext(ctx, "select 1 / (100000 - i) from generate_series(1, 100000) i")
			return err
		}, 1, "", nil, false},
		"ended by fn": {func(_ context.Context, tx *sql.Tx, _ int) error { return tx.Rollback() }, 1, "", txretry.ErrManaged, false},
		"ended by fn, which fails": {func(_ context.Context, tx *sql.Tx, _ int) error {
			return errors.Join(tx.Rollback(), conflict{})
		}, 1, "", txretry.ErrManaged, false},
	} {
		register := txretry.AfterCommit
		if strings.HasPrefix(name, "rows left open") { // the savepoint's state could not be read
			register = txdriver.Hint
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachDriver(t, func(t *testing.T, name string) {
				f := setup(t, name)
				f.exec(t, tables)
				calls, committed := 0, false
				err := f.manager(t, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					calls++
					register(tx, func() { committed = true })
					must(t, add(ctx, txretrysql.Tx(tx)))
					return test.fail(ctx, txretrysql.Tx(tx), calls)
				})
				if calls != test.calls || committed != test.commit || (err == nil) != test.commit {
					t.Errorf("%d calls, committed %v, error %v", calls, committed, err)
				}
				if test.state != "" && sqlstate.Of(err) != test.state || test.is != nil && !errors.Is(err, test.is) {
					t.Errorf("error %v", err)
				}
				want := 0
				if test.commit {
					want = 1
				}
				if n := f.count(t, "select n from counter"); n != want {
					t.Errorf("the counter is %d", n)
				}
			})
		})
	}
}

type conflict struct{}

func (conflict) Error() string    { return "conflict" }
func (conflict) SQLState() string { return "40001" }

func TestTx(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		var stale pgx.Tx
		must(t, f.manager(t, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			stale = tx
			sp, err := tx.Begin(ctx)
			must(t, err)
			if own := txretrysql.Tx(tx); own == nil || txretrysql.Tx(sp) != own {
				t.Error("a savepoint has another transaction below it")
			}
			var level string
			must(t, txretrysql.Tx(sp).QueryRowContext(ctx, "select current_setting('transaction_isolation') || current_setting('lock_timeout')").Scan(&level))
			if level != "serializable8s" {
				t.Errorf("the settings are %s", level)
			}
			return sp.Commit(ctx)
		}))
		if txretrysql.Tx(stale) != nil {
			t.Error("a handle that is over has a transaction")
		}
		must(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			if txretrysql.Tx(tx) != nil {
				t.Error("a pgx transaction has one of database/sql")
			}
			return nil
		}))
	})
}

// Hooks belong to the savepoint that is open on the *sql.Tx.
func TestSavepointOfTheUser(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, name string) {
		f := setup(t, name)
		f.exec(t, tables)
		store := f.outbox(t)
		for last, want := range map[string][]int{"rollback to a": {1, 100}, "release a": {1, 10, 100}} {
			f.exec(t, "truncate holdfast_outbox")
			var ran []int
			err := f.manager(t, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				work := func(n int) error {
					txretry.AfterCommit(tx, func() { ran = append(ran, n) })
					return store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
				}
				run := func(sql string) error {
					_, err := txretrysql.Tx(tx).ExecContext(ctx, sql)
					return err
				}
				return errors.Join(work(1), run("savepoint a"), work(10), run(last), work(100))
			})
			must(t, err)
			if n := f.count(t, "select count(*) from holdfast_outbox"); n != len(want) || !slices.Equal(ran, want) {
				t.Errorf("%s: %d messages, functions %v, want %v", last, n, ran, want)
			}
		}
	})
}

// A COMMIT whose answer is lost has an unknown outcome, or is resolved by a query. It is never
// repeated.
func TestCommitReplyLost(t *testing.T) {
	t.Parallel()
	for _, asked := range []bool{false, true} {
		t.Run(fmt.Sprintf("asked %v", asked), func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, f *fixture) {
				f.exec(t, tables)
				proxy := testenv.NewProxy(t, f.pool.Config().ConnString())
				m := f.through(t, proxy.URL()).manager(t, txretry.Config{XactStatus: asked, CommitTimeout: time.Minute})
				calls, committed := 0, false
				healed := make(chan struct{})
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					calls++
					txretry.AfterCommit(tx, func() { committed = true })
					defer proxy.DropReplies()
					go func() {
						defer close(healed)
						testenv.Eventually(t, func() error {
							if f.count(t, "select n from counter") != 1 {
								return errors.New("not committed")
							}
							return nil
						})
						proxy.Cut() // no pending answer arrives any more
						proxy.Heal()
					}()
					_, err := tx.Exec(ctx, addSQL)
					return err
				})
				<-healed
				_, unknown := errors.AsType[*txretry.CommitUnknownError](err)
				if calls != 1 || committed != asked || unknown == asked || (err == nil) != asked {
					t.Errorf("%d calls, committed %v, error %v", calls, committed, err)
				}
			})
		})
	}
}

// A silent server is abandoned when the driver stops at the end of its context.
func TestSilence(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for timeouts")
	f := setup(t, "pgx stdlib")
	f.exec(t, tables)
	proxy := testenv.NewProxy(t, f.pool.Config().ConnString())
	m := f.through(t, proxy.URL()).manager(t, txretry.Config{StatementTimeout: time.Second, CommitTimeout: time.Second, MaxAttempts: 1})
	for name, test := range map[string]struct {
		fn   func(ctx context.Context, tx pgx.Tx) error
		want func(err error) bool
	}{
		"at a statement": {func(ctx context.Context, tx pgx.Tx) error {
			proxy.Pause()
			_, err := tx.Exec(ctx, "select 1")
			return err
		}, func(err error) bool { _, ok := errors.AsType[*txretry.UnavailableError](err); return ok }},
		"at COMMIT": {func(ctx context.Context, tx pgx.Tx) error {
			err := add(ctx, txretrysql.Tx(tx))
			proxy.Pause()
			return err
		}, func(err error) bool { _, ok := errors.AsType[*txretry.CommitUnknownError](err); return ok }},
	} {
		if err := m.Do(t.Context(), test.fn); !test.want(err) {
			t.Errorf("%s: error %v", name, err)
		}
		proxy.Resume()
	}
}

func TestConnectionLost(t *testing.T) {
	t.Parallel()
	eachDriver(t, func(t *testing.T, name string) {
		f := setup(t, name)
		m := f.manager(t, txretry.Config{MaxAttempts: 1})
		for how, end := range map[string]func(ctx context.Context, tx pgx.Tx, pid int) error{
			"by the handle": func(ctx context.Context, tx pgx.Tx, _ int) error {
				_, err := tx.Exec(ctx, "select 1")
				return err
			},
			"by the sql.Tx": func(ctx context.Context, tx pgx.Tx, _ int) error {
				_, err := txretrysql.Tx(tx).ExecContext(ctx, "select 1")
				return err
			},
		} {
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				var pid int
				must(t, txretrysql.Tx(tx).QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid))
				f.exec(t, "select pg_terminate_backend($1, 5000)", pid)
				return end(ctx, tx, pid)
			})
			if _, ok := errors.AsType[*txretry.UnavailableError](err); !ok {
				t.Errorf("%s: error %v, want *UnavailableError", how, err)
			}
			must(t, m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return nil }))
		}
	})
}

// The documentation states the number of round trips.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	want := map[string][4]int64{"pgx stdlib": {3, 4, 4, 6}, "lib pq": {3, 5, 5, 9}}
	eachDriver(t, func(t *testing.T, name string) {
		f := setup(t, name)
		f.db.SetMaxOpenConns(1)
		store, m := f.outbox(t), f.manager(t, txretry.Config{})
		books, err := inboxpgx.New(m, "a", inboxpgx.Config{})
		must(t, err)
		must(t, books.Migrate(t.Context()))
		must(t, inboxpgx.Handle(books, inboxconformance.Name, func(context.Context, pgx.Tx, inboxconformance.Event) error { return nil }))
		once := f.idempotency(t, idempotencypgx.Config{})
		for i, do := range []func() error{
			func() error {
				return m.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil })
			},
			func() error {
				return m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					return store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
				})
			},
			func() error { return books.Process(t.Context(), []*inbox.Message{event("1")})[0] },
			func() error {
				_, _, err := once.DoKey(t.Context(), idempotency.NewKey(), nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: 200}, nil
				})
				return err
			},
		} {
			must(t, do()) // connects, and prepares statements
			must(t, do()) // pings, before the connection is used again
			least := int64(math.MaxInt64)
			for tries := 0; tries < 10 && least > want[name][i]; tries++ { // a transaction that takes a second pings once more
				f.sent.Store(0)
				must(t, do())
				least = min(least, f.sent.Load())
			}
			if least != want[name][i] {
				t.Errorf("transaction %d takes %d round trips, want %d", i, least, want[name][i])
			}
		}
	})
}

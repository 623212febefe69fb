package txretry_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestSettings(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{})
	const show = `select concat_ws(' / ', current_setting('transaction_isolation'), current_setting('transaction_read_only'),
		current_setting('transaction_deferrable'), current_setting('lock_timeout'), current_setting('statement_timeout'),
		current_setting('idle_in_transaction_session_timeout'))`
	tests := []struct {
		opts txretry.Options
		want string
	}{
		{txretry.Options{}, "serializable / off / off / 8s / 0 / 30s"},
		{txretry.Options{Isolation: pgx.ReadCommitted, LockTimeout: time.Millisecond}, "read committed / off / off / 1ms / 0 / 30s"},
		{txretry.Options{StatementTimeout: -1, IdleTimeout: -1}, "serializable / off / off / 8s / 0 / 0"},
		{txretry.Options{ReadOnly: true}, "serializable / on / off / 8s / 0 / 30s"},
		{txretry.Options{Isolation: pgx.RepeatableRead, LockTimeout: 1500001 * time.Microsecond, StatementTimeout: time.Minute, IdleTimeout: time.Hour}, "repeatable read / off / off / 1501ms / 1min / 1h"},
	}
	for _, tt := range tests {
		for range 2 { // rendered, then cached
			var got string
			err := m.DoWith(t.Context(), tt.opts, func(ctx context.Context, tx pgx.Tx) error {
				return tx.QueryRow(ctx, show).Scan(&got)
			})
			if err != nil || got != tt.want {
				t.Errorf("%+v: %q, error %v, want %q", tt.opts, got, err, tt.want)
			}
		}
	}
	var after string
	if err := pool.QueryRow(t.Context(), "show lock_timeout").Scan(&after); err != nil || after != "0" {
		t.Errorf("lock_timeout outside a transaction is %q, error %v", after, err)
	}
}

func TestHandleFacilities(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"counter"}, []string{"id", "n"}, pgx.CopyFromRows([][]any{{11, 1}, {12, 2}}))
		if err != nil || n != 2 {
			t.Errorf("CopyFrom: %d, %v", n, err)
		}
		var batch pgx.Batch
		batch.Queue("update counter set n = n + 1 where id = 11")
		sum := 0
		batch.Queue("select sum(n)::int from counter").QueryRow(func(row pgx.Row) error { return row.Scan(&sum) })
		if err := tx.SendBatch(ctx, &batch).Close(); err != nil || sum != 4 {
			t.Errorf("SendBatch: sum %d, %v", sum, err)
		}
		if _, err := tx.Prepare(ctx, "one", "select 1"); err != nil {
			t.Errorf("Prepare: %v", err)
		}
		rows, err := tx.Query(ctx, "select id from counter where n > 0 order by id")
		if err != nil {
			return err
		}
		if ids, err := pgx.CollectRows(rows, pgx.RowTo[int]); err != nil || len(ids) != 2 {
			t.Errorf("Query: %v, %v", ids, err)
		}
		objects := tx.LargeObjects()
		oid, err := objects.Create(ctx, 0)
		if err != nil {
			return err
		}
		object, err := objects.Open(ctx, oid, pgx.LargeObjectModeWrite)
		if err != nil {
			return err
		}
		if _, err := io.WriteString(object, "text"); err != nil {
			t.Errorf("LargeObjects: %v", err)
		}
		if err := objects.Unlink(ctx, oid); err != nil {
			t.Errorf("LargeObjects: %v", err)
		}
		return tx.Conn().Ping(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Do reports an error that shows only later, even if fn ignores it.
func TestHandle_reportsSwallowedErrors(t *testing.T) {
	t.Parallel()
	const broken = "select 1 / n from counter"
	for name, run := range map[string]func(ctx context.Context, tx pgx.Tx){
		"Exec":     func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, broken) },
		"QueryRow": func(ctx context.Context, tx pgx.Tx) { _ = tx.QueryRow(ctx, broken).Scan(nil) },
		"Query": func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, broken)
			rows.Close()
		},
		"SendBatch": func(ctx context.Context, tx pgx.Tx) {
			var batch pgx.Batch
			batch.Queue(broken)
			_ = tx.SendBatch(ctx, &batch).Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				run(ctx, tx)
				_, _ = tx.Exec(ctx, "select 1") // 25P02 hides nothing
				return nil
			})
			if !errors.Is(err, pgx.ErrTxCommitRollback) {
				t.Errorf("error %v, want one that is pgx.ErrTxCommitRollback", err)
			}
			wantSQLSTATE(t, err, "22012")
		})
	}
}

func TestFakeEffectRefusesRealTransaction(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return txretrytest.Effect(tx, func() { t.Error("applied") }, func() {})
	})
	if err == nil {
		t.Error("no error")
	}
}

func TestAtCommit(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for range 2 {
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if !txretry.AtCommit(tx, addSQL, 1) {
					t.Error("AtCommit refused")
				}
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				txretry.AtCommit(tx, addSQL, 100)
				txretry.AtCommit(sp, addSQL, 1000)
				if err := sp.Rollback(ctx); err != nil {
					return err
				}
				txretry.AtCommit(tx, addSQL, 10)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		wantCounter(t, pool, 22)
	})
}

func TestAtCommitFails(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for name, tt := range map[string]struct {
			sql  string
			args []any
			code string // "": differs between the modes
		}{
			"unique violation":  {"insert into counter values (1, 0)", nil, "23505"},
			"no such table":     {"insert into missing values (1)", nil, "42P01"},
			"bad argument":      {addSQL, []any{make(chan int)}, ""},
			"too few arguments": {addSQL, nil, ""},
		} {
			calls := 0
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Errorf("%s: AfterCommit ran", name) })
				txretry.AtCommit(tx, addSQL, 1)
				txretry.AtCommit(tx, tt.sql, tt.args...)
				return add(ctx, tx, 10)
			})
			if err == nil || calls != 1 {
				t.Errorf("%s: error %v after %d calls, want an error after one", name, err, calls)
			}
			var unknown *txretry.CommitUnknownError
			if errors.As(err, &unknown) {
				t.Errorf("%s: a definite rollback is called unknown: %v", name, err)
			}
			if tt.code != "" {
				wantSQLSTATE(t, err, tt.code)
			}
		}
		wantCounter(t, pool, 0)
	})
}

func TestAtCommitRetried(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		exec(t, pool, `create function lose() returns int language plpgsql as
			$$ begin raise exception 'test' using errcode = '40001'; end $$`)
		calls := 0
		err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			calls++
			txretry.AtCommit(tx, addSQL, 1)
			if calls < 3 {
				txretry.AtCommit(tx, "select lose()")
			}
			return nil
		})
		if err != nil || calls != 3 {
			t.Fatalf("error %v after %d calls, want none after 3", err, calls)
		}
		wantCounter(t, pool, 1)
	})
}

// If a statement of AtCommit rolls the transaction back, Do must not report a commit. The COMMIT after it gets the
// same reply as for a real transaction.
func TestAtCommitEndsTheTransaction(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for _, sql := range []string{"rollback", "commit"} {
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if !txretry.AtCommit(tx, addSQL, 1) || !txretry.AtCommit(tx, sql) {
					t.Error("not the manager's handle")
				}
				return nil
			})
			var unknown *txretry.CommitUnknownError
			if !errors.As(err, &unknown) || !errors.Is(err, txretry.ErrManaged) {
				t.Errorf("%s: error = %v, want an unknown outcome", sql, err)
			}
		}
		wantCounter(t, pool, 1)
	})
}

// senders are the ways in which users send a statement in a transaction.
var senders = map[string]func(ctx context.Context, tx pgx.Tx, sql string) error{
	"Exec": func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Exec(ctx, sql)
		return err
	},
	"Query": func(ctx context.Context, tx pgx.Tx, sql string) error {
		rows, err := tx.Query(ctx, sql)
		rows.Close()
		return errors.Join(err, rows.Err())
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx, sql string) error {
		if err := tx.QueryRow(ctx, sql).Scan(); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		return nil
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx, sql string) error {
		var batch pgx.Batch
		batch.Queue("select 1")
		batch.Queue(sql)
		return tx.SendBatch(ctx, &batch).Close()
	},
	"Prepare": func(ctx context.Context, tx pgx.Tx, sql string) error {
		if _, err := tx.Prepare(ctx, "select "+sql, sql); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "select "+sql)
		return err
	},
	"Conn": func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Conn().Exec(ctx, sql)
		return err
	},
	"a handle of a savepoint": func(ctx context.Context, tx pgx.Tx, sql string) error {
		return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			_, err := sp.Exec(ctx, "select 1")
			return err
		})
	},
	"comments, cases and quotes": func(ctx context.Context, tx pgx.Tx, sql string) error {
		switch sql {
		case "savepoint a":
			sql = "/* select /* 1 */ */ -- select\n SAVEpoint \"a\""
		case "rollback to a":
			sql = "\tRollBack /**/ TRANSACTION\nto SavePoint A;"
		}
		_, err := tx.Exec(ctx, sql)
		return err
	},
	"several statements in a text": func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Exec(ctx, "select 1; "+sql)
		return err
	},
	"after a failed statement": func(ctx context.Context, tx pgx.Tx, sql string) error {
		if sql == "rollback to a" {
			_, _ = tx.Exec(ctx, "select 1/0")
			txretry.AfterCommit(tx, func() { panic("registered in a failed transaction") })
			txretry.AtCommit(tx, addSQL, 1000)
		}
		_, err := tx.Exec(ctx, sql)
		return err
	},
}

// later defers a statement to COMMIT if the handle can do that.
func later(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	if txretry.AtCommit(tx, sql, args...) {
		return nil
	}
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

// A registration belongs to the savepoint of that moment, however the savepoint was created.
func TestDeferred_belongsToTheSavepoint(t *testing.T) {
	t.Parallel()
	pgtest.New(t)
	for name, send := range senders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			m := newManager(t, pool, txretry.Config{})
			for last, want := range map[string]int{"rollback to a": 101, "release a": 111} {
				if name == "a handle of a savepoint" { // its savepoint is not foreign
					want = 111
				}
				exec(t, pool, "update counter set n = 0")
				var ran []int
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					work := func(n int) error {
						txretry.AfterCommit(tx, func() { ran = append(ran, n) })
						return later(ctx, tx, addSQL, n)
					}
					return errors.Join(work(1), send(ctx, tx, "savepoint a"), work(10), send(ctx, tx, last), work(100))
				})
				wanted := []int{1, 10, 100}
				if want == 101 {
					wanted = []int{1, 100}
				}
				if err != nil || !slices.Equal(ran, wanted) {
					t.Errorf("%s: functions %v, error %v", last, ran, err)
				}
				wantCounter(t, pool, want)
			}
		})
	}
}

// A deferred statement runs with the settings of the moment of its registration.
func TestDeferred_keepsRoleAndSearchPath(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"SET LOCAL search_path": "set local search_path = elsewhere",
		"SET search_path":       "-- a comment\nSET search_path TO elsewhere",
		"set_config":            "select set_config('search_path', 'elsewhere', true)",
		"pg_settings":           "update pg_settings set setting = 'elsewhere' where name = 'search_path'",
		"a block":               "do $$ begin perform set_config('search_path', 'elsewhere', true); end $$",
		"SET LOCAL ROLE":        "set local role pg_monitor",
		"SESSION AUTHORIZATION": "set local session authorization pg_monitor",
		"several in one text":   "select 1; set local role pg_monitor",
		"DISCARD":               "discard plans",
		"SET CONSTRAINTS":       "set constraints all immediate",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			ran, own := false, pgtest.Pool(t, pool.Config().ConnString(), 1) // some settings outlast the transaction
			err := newManager(t, own, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				txretry.AtCommit(tx, addSQL, 1)
				txretry.AfterCommit(tx, func() { ran = true })
				_, err := tx.Exec(ctx, sql)
				return err
			})
			if err != nil || !ran {
				t.Errorf("error %v, function ran %v", err, ran)
			}
			wantCounter(t, pool, 1)
		})
	}
}

// The error of a deferred statement is returned where it is sent, and nothing commits.
func TestDeferred_failsWhereItIsSent(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		txretry.AtCommit(tx, addSQL, 1)
		txretry.AtCommit(tx, "insert into counter values (1, 0)")
		_, err := tx.Exec(ctx, "savepoint a")
		wantSQLSTATE(t, err, "23505")
		return nil
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("error %v", err)
	}
	wantSQLSTATE(t, err, "23505")
	wantCounter(t, pool, 0)
}

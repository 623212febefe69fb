package txretrytest_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestScript(t *testing.T) {
	t.Parallel()
	type stats = txretrytest.Stats
	at := func(p txretrytest.Point, sqlstate string) txretrytest.Fault {
		return txretrytest.Fault{Point: p, SQLSTATE: sqlstate}
	}
	tests := []struct {
		name   string
		script []txretrytest.Fault
		want   stats
		calls  int
		n      int
		err    any // nil, an SQLSTATE, or a pointer for errors.As
	}{
		{"nothing", nil, stats{1, 1, 0}, 1, 1, nil},
		{"no fault", []txretrytest.Fault{{}}, stats{1, 1, 0}, 1, 1, nil},
		{"begin", []txretrytest.Fault{at(txretrytest.AtBegin, "40001")}, stats{2, 1, 0}, 1, 1, nil},
		{"begin, permanent", []txretrytest.Fault{at(txretrytest.AtBegin, "0A000")}, stats{1, 0, 0}, 0, 0, "0A000"},
		{"end", []txretrytest.Fault{at(txretrytest.AtEnd, "40P01")}, stats{2, 1, 1}, 2, 1, nil},
		{"commit", []txretrytest.Fault{at(txretrytest.AtCommit, "40001"), at(txretrytest.AtCommit, "40001")}, stats{3, 1, 2}, 3, 1, nil},
		{"deferred constraint", []txretrytest.Fault{at(txretrytest.AtCommit, "23503")}, stats{1, 0, 1}, 1, 0, "23503"},
		{"reply lost, applied", []txretrytest.Fault{at(txretrytest.ReplyLostApplied, "")}, stats{1, 1, 0}, 1, 1, new(*txretry.CommitUnknownError)},
		{"reply lost, not applied", []txretrytest.Fault{at(txretrytest.ReplyLostNotApplied, "")}, stats{1, 0, 1}, 1, 0, new(*txretry.CommitUnknownError)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c counter
				m := txretrytest.New(txretrytest.Config{Script: tt.script})
				calls, hooks := 0, 0
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					calls++
					txretry.AfterCommit(tx, func() { hooks++ })
					return c.Add(ctx, tx, 1)
				})
				switch want := tt.err.(type) {
				case nil:
					if err != nil {
						t.Errorf("error %v", err)
					}
				case string:
					var pgErr *pgconn.PgError
					if !errors.As(err, &pgErr) || pgErr.Code != want {
						t.Errorf("error %v, want SQLSTATE %s", err, want)
					}
				default:
					if !errors.As(err, want) {
						t.Errorf("error %v, want %T", err, want)
					}
				}
				if (hooks == 1) != (err == nil) {
					t.Errorf("AfterCommit ran %d times with error %v", hooks, err)
				}
				if got := m.Stats(); got != tt.want || calls != tt.calls || c.value() != tt.n {
					t.Errorf("stats %+v, %d calls, counter %d; want %+v, %d, %d", got, calls, c.value(), tt.want, tt.calls, tt.n)
				}
			})
		})
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]txretrytest.Config{
		"unknown point":            {Script: []txretrytest.Fault{{Point: 99}}},
		"no SQLSTATE":              {Script: []txretrytest.Fault{{Point: txretrytest.AtCommit}}},
		"SQLSTATE of a lost reply": {Script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied, SQLSTATE: "40001"}}},
		"no statement":             {Script: []txretrytest.Fault{{Point: txretrytest.AtStatement, SQLSTATE: "40001"}}},
		"statement elsewhere":      {Script: []txretrytest.Fault{{Point: txretrytest.AtEnd, Statement: 1, SQLSTATE: "40001"}}},
		"retry configuration":      {Retry: txretry.Config{MaxAttempts: -1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			txretrytest.New(cfg)
		})
	}
}

func TestNoSQLAtBegin(t *testing.T) {
	t.Parallel()
	m := txretrytest.New(txretrytest.Config{})
	opts := txretry.Options{AtBegin: driver.Statement{SQL: "delete from everything"}}
	err := m.DoWith(t.Context(), opts, func(context.Context, pgx.Tx) error {
		t.Error("fn ran")
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "runs no SQL") || m.Stats().Rollbacks != 1 {
		t.Errorf("error %v, stats %+v", err, m.Stats())
	}
}

func TestNoSQL(t *testing.T) {
	t.Parallel()
	const sql = "delete from everything"
	for name, run := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql); return err },
		"Query": func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, sql)
			_, err := pgx.CollectRows(rows, pgx.RowTo[int])
			return err
		},
		"QueryRow": func(ctx context.Context, tx pgx.Tx) error { return tx.QueryRow(ctx, sql).Scan(new(int)) },
		"SendBatch": func(ctx context.Context, tx pgx.Tx) error {
			var b pgx.Batch
			b.Queue(sql)
			return tx.SendBatch(ctx, &b).Close()
		},
		"Prepare": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Prepare(ctx, "p", sql); return err },
		"AtCommit": func(_ context.Context, tx pgx.Tx) error {
			if !txretry.AtCommit(tx, sql) {
				return errors.New("AtCommit refused")
			}
			return nil
		},
		"swallowed": func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, sql); return nil },
		"in a savepoint": func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { _, err := sp.Exec(ctx, sql); return err })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := txretrytest.New(txretrytest.Config{})
			err := m.Do(t.Context(), run)
			if err == nil || !strings.Contains(err.Error(), "runs no SQL") || !strings.Contains(err.Error(), sql) {
				t.Errorf("error %v, want one quoting the statement", err)
			}
			if s := m.Stats(); s.Rollbacks != 1 || s.Commits != 0 {
				t.Errorf("stats %+v, want one rollback", s)
			}
		})
	}
}

func TestEffectRefuses(t *testing.T) {
	t.Parallel()
	nothing := func() {}
	unwanted := func() { t.Error("applied") }
	if err := txretrytest.Effect(nil, unwanted, nothing); err == nil {
		t.Error("nil tx: no error")
	}
	m := txretrytest.New(txretrytest.Config{})
	var stale pgx.Tx
	err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		stale = tx
		if txretrytest.Effect(tx, nil, nothing) == nil || txretrytest.Effect(tx, unwanted, nil) == nil {
			t.Error("nil function: no error")
		}
		err := txretrytest.Effect(struct{ pgx.Tx }{tx}, unwanted, nothing)
		if err == nil || !strings.Contains(err.Error(), "struct { pgx.Tx }") {
			t.Errorf("foreign tx: error %v does not name its type", err)
		}
		if txretrytest.Fail(tx, nil) == nil {
			t.Error("Fail(nil): no error")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := txretrytest.Effect(stale, unwanted, nothing); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("stale tx: error %v", err)
	}
}

// Transactions run one at a time; waiting for the turn ends with the context.
func TestOneAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := txretrytest.New(txretrytest.Config{})
		first := make(chan error, 1)
		go func() {
			first <- m.Do(t.Context(), func(context.Context, pgx.Tx) error {
				time.Sleep(time.Hour)
				return nil
			})
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := m.Do(ctx, func(context.Context, pgx.Tx) error {
			t.Error("ran beside another transaction")
			return nil
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want deadline exceeded", err)
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
	})
}

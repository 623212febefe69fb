package txretrytest_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/txretry/conformance"
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

// Transactions run one at a time. The wait for the slot ends with the context.
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
			t.Error("ran at the same time as another transaction")
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

// stage logs the effect's calls at COMMIT. The effect "refused" fails.
func stage(tx pgx.Tx, log *[]string, name string) error {
	note := func(what string) func() { return func() { *log = append(*log, what+" "+name) } }
	apply := func() error {
		if name == "refused" {
			return errRefused
		}
		note("apply")()
		return nil
	}
	return txretrytest.EffectAtCommit(tx, apply, note("undo"), note("commit"))
}

var errRefused = &pgconn.PgError{Severity: "ERROR", Code: "23505"}

func TestEffectAtCommit(t *testing.T) {
	t.Parallel()
	failed := errors.New("business error")
	one := func(_ context.Context, tx pgx.Tx, log *[]string) error { return stage(tx, log, "a") }
	inSavepoint := func(result error) func(context.Context, pgx.Tx, *[]string) error {
		return func(ctx context.Context, tx pgx.Tx, log *[]string) error {
			err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return errors.Join(stage(sp, log, "inner"), result) })
			if !errors.Is(err, result) {
				return err
			}
			return stage(tx, log, "outer")
		}
	}
	for name, tc := range map[string]struct {
		script []txretrytest.Fault
		run    func(context.Context, pgx.Tx, *[]string) error
		want   []string
		err    error // the error that Do must return; nil: any
	}{
		"commit": {run: one, want: []string{"apply a", "commit a"}},
		"in order": {
			run: func(_ context.Context, tx pgx.Tx, log *[]string) error {
				return errors.Join(stage(tx, log, "a"), stage(tx, log, "b"))
			},
			want: []string{"apply a", "apply b", "commit a", "commit b"},
		},
		"rollback": {
			run: func(_ context.Context, tx pgx.Tx, log *[]string) error {
				return errors.Join(stage(tx, log, "a"), stage(tx, log, "b"), failed)
			},
			want: nil,
		},
		"retry": {
			script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}},
			run:    one, want: []string{"apply a", "commit a"},
		},
		"reply lost, applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}},
			run:    one, want: []string{"apply a", "commit a"},
		},
		"reply lost, not applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostNotApplied}},
			run:    one, want: nil,
		},
		"savepoint kept": {
			run:  inSavepoint(nil),
			want: []string{"apply inner", "apply outer", "commit inner", "commit outer"},
		},
		"savepoint rolled back": {
			run:  inSavepoint(failed),
			want: []string{"apply outer", "commit outer"},
		},
		"one is refused": {
			run: func(_ context.Context, tx pgx.Tx, log *[]string) error {
				return errors.Join(stage(tx, log, "a"), stage(tx, log, "refused"), stage(tx, log, "b"))
			},
			want: []string{"apply a", "undo a"}, err: errRefused,
		},
		"one is refused, reply lost": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}},
			run: func(_ context.Context, tx pgx.Tx, log *[]string) error {
				return errors.Join(stage(tx, log, "a"), stage(tx, log, "refused"))
			},
			want: []string{"apply a", "undo a"},
		},
		"one is refused in a savepoint that is rolled back": {
			run: func(ctx context.Context, tx pgx.Tx, log *[]string) error {
				err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return errors.Join(stage(sp, log, "refused"), failed) })
				if !errors.Is(err, failed) {
					return err
				}
				return stage(tx, log, "a")
			},
			want: []string{"apply a", "commit a"},
		},
		"in a transaction that has failed": {
			run: func(_ context.Context, tx pgx.Tx, log *[]string) error {
				_ = txretrytest.Fail(tx, errRefused) // fn ignores the error
				return stage(tx, log, "a")
			},
			want: nil, err: errRefused,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log []string
				m := txretrytest.New(txretrytest.Config{Script: tc.script})
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return tc.run(ctx, tx, &log) })
				if !slices.Equal(log, tc.want) {
					t.Errorf("%q with error %v, want %q", log, err, tc.want)
				}
				if tc.err != nil && !errors.Is(err, tc.err) {
					t.Errorf("the error is %v, want %v", err, tc.err)
				}
			})
		})
	}
}

func TestEffectAtCommitRefuses(t *testing.T) {
	t.Parallel()
	unwanted := func() { t.Error("run") }
	apply := func() error { unwanted(); return nil }
	m := txretrytest.New(txretrytest.Config{})
	var closed pgx.Tx
	err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		closed = tx
		if txretrytest.EffectAtCommit(tx, nil, unwanted, unwanted) == nil {
			t.Error("no apply: no error")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := txretrytest.EffectAtCommit(closed, apply, unwanted, unwanted); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("closed: %v", err)
	}
	for _, tx := range []pgx.Tx{nil, struct{ pgx.Tx }{}} {
		if txretrytest.EffectAtCommit(tx, apply, unwanted, unwanted) == nil {
			t.Errorf("%T: no error", tx)
		}
	}
	err = m.DoWith(t.Context(), txretry.Options{ReadOnly: true}, func(_ context.Context, tx pgx.Tx) error {
		return txretrytest.EffectAtCommit(tx, apply, unwanted, unwanted)
	})
	if said, ok := errors.AsType[*pgconn.PgError](err); !ok || said.Code != "25006" {
		t.Errorf("read only: %v", err)
	}
}

package txretrytest_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// stage logs what happens to an effect at COMMIT. One that is called "refused" fails.
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
		err    error // that comes out of Do, if it matters
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
				_ = txretrytest.Fail(tx, errRefused) // swallowed
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

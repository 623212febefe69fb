package txretrytest_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// stage logs what happens to a staged effect.
func stage(tx pgx.Tx, log *[]string, name string) error {
	note := func(what string) func() { return func() { *log = append(*log, what+" "+name) } }
	return txretrytest.StagedEffect(tx, note("apply"), note("undo"), note("commit"))
}

func TestStagedEffect(t *testing.T) {
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
			want: []string{"apply a", "apply b", "undo b", "undo a"},
		},
		"retry": {
			script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}},
			run:    one, want: []string{"apply a", "undo a", "apply a", "commit a"},
		},
		"reply lost, applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}},
			run:    one, want: []string{"apply a", "commit a"},
		},
		"reply lost, not applied": {
			script: []txretrytest.Fault{{Point: txretrytest.ReplyLostNotApplied}},
			run:    one, want: []string{"apply a", "undo a"},
		},
		"savepoint kept": {
			run:  inSavepoint(nil),
			want: []string{"apply inner", "apply outer", "commit inner", "commit outer"},
		},
		"savepoint rolled back": {
			run:  inSavepoint(failed),
			want: []string{"apply inner", "undo inner", "apply outer", "commit outer"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log []string
				m := txretrytest.NewManager(txretrytest.Config{Script: tc.script})
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return tc.run(ctx, tx, &log) })
				if !slices.Equal(log, tc.want) {
					t.Errorf("%q with error %v, want %q", log, err, tc.want)
				}
			})
		})
	}
}

func TestStagedEffectRefuses(t *testing.T) {
	t.Parallel()
	nothing, unwanted := func() {}, func() { t.Error("run") }
	m := txretrytest.NewManager(txretrytest.Config{})
	err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		for _, fns := range [][3]func(){{nil, nothing, unwanted}, {unwanted, nil, unwanted}, {unwanted, nothing, nil}} {
			if txretrytest.StagedEffect(tx, fns[0], fns[1], fns[2]) == nil {
				t.Error("a nil function: no error")
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if txretrytest.StagedEffect(nil, unwanted, unwanted, unwanted) == nil {
		t.Error("nil tx: no error")
	}
}

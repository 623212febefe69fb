package txretrytest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// failAtCommit makes COMMIT fail.
func failAtCommit(tx pgx.Tx, err error) error {
	return txretrytest.EffectAtCommit(tx, func() error { return err }, nil, nil)
}

// What fails at COMMIT leaves the transaction usable until then, and is undone
// with its savepoint.
func TestFailAtCommit(t *testing.T) {
	t.Parallel()
	late, early := errors.New("late"), errors.New("early")
	for name, tt := range map[string]struct {
		run  func(ctx context.Context, tx pgx.Tx) error
		want error
	}{
		"alone": {func(_ context.Context, tx pgx.Tx) error {
			return failAtCommit(tx, late)
		}, late},
		"goes on": {func(_ context.Context, tx pgx.Tx) error {
			return errors.Join(failAtCommit(tx, late), txretrytest.Effect(tx, func() {}, func() {}))
		}, late},
		"savepoint kept": {func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return failAtCommit(sp, late) })
		}, late},
		"savepoint rolled back": {func(ctx context.Context, tx pgx.Tx) error {
			err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return errors.Join(early, failAtCommit(sp, late)) })
			if !errors.Is(err, early) {
				return err
			}
			return nil
		}, nil},
		"rolled back anyway": {func(_ context.Context, tx pgx.Tx) error {
			return errors.Join(early, failAtCommit(tx, late))
		}, early},
	} {
		m := txretrytest.New(txretrytest.Config{})
		applied := 0
		err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(txretrytest.Effect(tx, func() { applied++ }, func() { applied-- }), tt.run(ctx, tx))
		})
		if !errors.Is(err, tt.want) || (tt.want == nil) != (applied == 1) {
			t.Errorf("%s: Do = %v, %d applied; want %v", name, err, applied, tt.want)
		}
	}
}

// Of several statements that fail the first one is told, and what fails is not applied, told or not.
func TestFailAtCommitFirst(t *testing.T) {
	t.Parallel()
	first := errors.New("first")
	for name, tt := range map[string]struct {
		fault txretrytest.Fault
		want  error
	}{
		"told":   {txretrytest.Fault{}, first},
		"untold": {txretrytest.Fault{Point: txretrytest.ReplyLostApplied}, nil},
	} {
		applied := 0
		err := scripted(tt.fault).Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			return errors.Join(txretrytest.Effect(tx, func() { applied++ }, func() { applied-- }),
				failAtCommit(tx, first), failAtCommit(tx, errors.New("second")))
		})
		if err == nil || !errors.Is(err, tt.want) && tt.want != nil || applied != 0 {
			t.Errorf("%s: error %v, %d applied", name, err, applied)
		}
	}
}

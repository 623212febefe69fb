package conformance

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

var inSavepoint = txretry.Options{Savepoint: true}

// nest runs inner as a nested call inside an outer one, to whose fn its error
// is given.
func (f *fixture) nest(opts txretry.Options, inner work, then func(ctx context.Context, tx pgx.Tx, err error) error) error {
	m := f.New(quick())
	return m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 1)
		return then(ctx, tx, m.DoWith(ctx, opts, inner))
	})
}

func testNestedSavepoint(f *fixture) {
	var ran []string
	var stale pgx.Tx
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		stale = tx
		f.is(tx.Commit(ctx), txretry.ErrManaged)
		f.is(tx.Rollback(ctx), txretry.ErrManaged)
		txretry.AfterCommit(tx, func() { ran = append(ran, "inner") })
		return f.Add(ctx, tx, 10)
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.ok(err)
		f.equal("functions run before the outer commit", len(ran), 0)
		f.is(f.Add(ctx, stale, 1), pgx.ErrTxClosed)
		txretry.AfterCommit(tx, func() { ran = append(ran, "outer") })
		return f.Add(ctx, tx, 100)
	}))
	f.want(111)
	if want := []string{"inner", "outer"}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
}

func testNestedFails(f *fixture) {
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 10)
		txretry.AfterCommit(tx, func() { f.Error("function of a failed nested call was run") })
		return errBusiness
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.is(err, errBusiness)
		return f.Add(ctx, tx, 100)
	}))
	f.want(101)
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		_ = f.Fail(ctx, tx, "23505") // and returns nil
		return nil
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.is(err, pgx.ErrTxCommitRollback)
		f.sqlstate(err, "23505")
		return f.Add(ctx, tx, 1000)
	}))
	f.want(1102)
}

func testNestedPanic(f *fixture) {
	m := f.New(quick())
	f.ok(m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		func() {
			defer func() { f.equal("panic value", recover(), "boom") }()
			_ = m.DoWith(ctx, inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
				f.add(ctx, tx, 10)
				panic("boom")
			})
		}()
		return f.Add(ctx, tx, 1)
	}))
	f.want(1)
}

func testNestedTransient(f *fixture) {
	calls := 0
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		if calls < 3 {
			return f.Fail(ctx, tx, "40001")
		}
		return f.Add(ctx, tx, 10)
	}, func(_ context.Context, _ pgx.Tx, err error) error { return err }))
	f.equal("calls", calls, 3)
	f.want(11)
}

func testNestedRefused(f *fixture) {
	for name, opts := range map[string]txretry.Options{
		"stronger isolation": {Savepoint: true, Isolation: pgx.Serializable},
		"unknown isolation":  {Savepoint: true, Isolation: "chaos"},
		"negative attempts":  {Savepoint: true, MaxAttempts: -1},
		"read only":          {Savepoint: true, ReadOnly: true},
	} {
		m := f.New(quick())
		f.ok(m.DoWith(f.Context(), txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error {
			if err := m.DoWith(ctx, opts, func(context.Context, pgx.Tx) error { return nil }); err == nil {
				f.Errorf("%s: no error", name)
			}
			f.is(m.Do(ctx, func(context.Context, pgx.Tx) error { return nil }), txretry.ErrNested)
			return m.DoWith(ctx, inSavepoint, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) })
		}))
	}
	f.want(4)
}

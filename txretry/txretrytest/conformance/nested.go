package conformance

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

var inSavepoint = txretry.Options{Nested: txretry.NestedSavepoint}

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
	rolledBack := 0
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 10)
		txretry.AfterCommit(tx, func() { f.Error("function of a failed nested call was run") })
		txretry.AfterRollback(tx, func() { rolledBack++ })
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
	f.equal("AfterRollback functions run", rolledBack, 0)
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
		"stronger isolation": {Nested: txretry.NestedSavepoint, Isolation: pgx.Serializable},
		"unknown isolation":  {Nested: txretry.NestedSavepoint, Isolation: "chaos"},
		"negative attempts":  {Nested: txretry.NestedSavepoint, MaxAttempts: -1},
		"read only":          {Nested: txretry.NestedSavepoint, ReadOnly: true},
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

func testAfterRollback(f *fixture) {
	calls := 0
	var ran []int
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		sp, err := tx.Begin(ctx)
		f.ok(err)
		txretry.AfterRollback(sp, func() { ran = append(ran, calls*10) })
		f.ok(sp.Rollback(ctx))
		txretry.AfterRollback(tx, func() {
			f.want(0)
			ran = append(ran, calls*10+1)
		})
		txretry.AfterRollback(tx, nil)
		f.add(ctx, tx, 1)
		if calls == 1 {
			return f.Fail(ctx, tx, "40001")
		}
		return errBusiness
	})
	f.is(err, errBusiness)
	if want := []int{20, 21}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		f.equal("AfterRollback", txretry.AfterRollback(tx, func() { f.Error("run after a commit") }), true)
		f.equal("wrapped tx", txretry.AfterRollback(struct{ pgx.Tx }{tx}, func() {}), false)
		return nil
	}))
	f.equal("nil tx", txretry.AfterRollback(nil, func() {}), false)
}

func testAfterRollbackPanic(f *fixture) {
	ran := 0
	func() {
		defer func() { f.equal("panic value", recover(), "boom") }()
		_ = f.do(func(_ context.Context, tx pgx.Tx) error {
			txretry.AfterRollback(tx, func() { ran++ })
			panic("boom")
		})
	}()
	f.equal("functions run", ran, 1)
}

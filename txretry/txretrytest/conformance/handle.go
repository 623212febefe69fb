package conformance

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

func testSavepointRollback(f *fixture) {
	var ran []string
	after := func(tx pgx.Tx, name string) { txretry.AfterCommit(tx, func() { ran = append(ran, name) }) }
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 1)
		after(tx, "before")
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, sp, 10)
		f.add(ctx, tx, 100) // on the outer handle, yet inside the savepoint
		after(sp, "inside")
		after(tx, "inside, outer handle")
		f.ok(sp.Rollback(ctx))
		f.is(sp.Rollback(ctx), pgx.ErrTxClosed)
		f.is(f.Add(ctx, sp, 1), pgx.ErrTxClosed)
		f.add(ctx, tx, 1000)
		after(tx, "after")
		return nil
	}))
	f.want(1001)
	if want := []string{"before", "after"}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
}

func testSavepointCommit(f *fixture) {
	ran := 0
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			txretry.AfterCommit(sp, func() { ran++ })
			return f.Add(ctx, sp, 1)
		})
	}))
	f.equal("functions run", ran, 1)
	f.want(1)
}

func testSavepointLeftOpen(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		sp, err := tx.Begin(ctx)
		f.ok(err)
		return f.Add(ctx, sp, 1)
	}))
	f.want(1)
}

func testSavepointNesting(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		outer, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, outer, 1)
		inner, err := outer.Begin(ctx)
		f.ok(err)
		f.add(ctx, inner, 10)
		f.ok(inner.Commit(ctx))
		gone, err := outer.Begin(ctx)
		f.ok(err)
		f.ok(outer.Rollback(ctx)) // takes the committed and the open one inside with it
		f.is(gone.Commit(ctx), pgx.ErrTxClosed)
		f.equal("AfterCommit on a lost savepoint", txretry.AfterCommit(gone, func() {}), false)
		_, err = gone.Begin(ctx)
		f.is(err, pgx.ErrTxClosed)
		f.add(ctx, tx, 100)
		return nil
	}))
	f.want(100)
}

func testSavepointHeals(f *fixture) {
	calls := 0
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		f.add(ctx, tx, 1)
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.sqlstate(f.Fail(ctx, sp, "55P03"), "55P03")
		f.sqlstate(f.Add(ctx, sp, 1), "25P02")
		f.ok(sp.Rollback(ctx))
		return nil
	}))
	f.equal("calls", calls, 1)
	f.want(1)
}

// A rollback that never reaches the server must not let its effects commit.
func testSavepointCancelled(f *fixture) {
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, sp, 1)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		f.is(sp.Rollback(cancelled), context.Canceled)
		return nil
	})
	f.is(err, pgx.ErrTxCommitRollback)
	f.want(0)
}

func testAfterCommit(f *fixture) {
	calls := 0
	var ran []int
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		for i := range 3 {
			f.equal("AfterCommit", txretry.AfterCommit(tx, func() {
				f.want(1) // committed by now
				ran = append(ran, calls*10+i)
			}), true)
		}
		txretry.AfterCommit(tx, nil)
		f.add(ctx, tx, 1)
		if calls == 1 {
			return f.Fail(ctx, tx, "40001")
		}
		return nil
	}))
	if want := []int{20, 21, 22}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
	f.is(f.do(func(_ context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() { f.Error("run after a rollback") })
		return errBusiness
	}), errBusiness)
}

func testAfterCommitElsewhere(f *fixture) {
	f.equal("nil tx", txretry.AfterCommit(nil, func() {}), false)
	f.equal("nil tx, statement", txretry.AtCommit(nil, "select 1"), false)
	f.ok(f.do(func(_ context.Context, tx pgx.Tx) error {
		foreign := struct{ pgx.Tx }{tx}
		f.equal("wrapped tx", txretry.AfterCommit(foreign, func() {}), false)
		f.equal("wrapped tx, statement", txretry.AtCommit(foreign, "select 1"), false)
		txretry.AfterCommit(tx, func() {
			f.equal("committed tx", txretry.AfterCommit(tx, func() {}), false)
			f.equal("committed tx, statement", txretry.AtCommit(tx, "select 1"), false)
		})
		return nil
	}))
}

func testManaged(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		f.is(tx.Commit(ctx), txretry.ErrManaged)
		f.is(tx.Rollback(ctx), txretry.ErrManaged)
		return f.Add(ctx, tx, 1)
	}))
	f.want(1)
}

func testStale(f *fixture) {
	var outer, nested pgx.Tx
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) (err error) {
		outer = tx
		nested, err = tx.Begin(ctx)
		return err
	}))
	ctx := f.Context()
	for _, tx := range []pgx.Tx{outer, nested} {
		f.is(f.Add(ctx, tx, 1), pgx.ErrTxClosed)
		_, err := tx.Exec(ctx, "select 1")
		f.is(err, pgx.ErrTxClosed)
		rows, err := tx.Query(ctx, "select 1")
		f.is(err, pgx.ErrTxClosed)
		f.is(rows.Err(), pgx.ErrTxClosed)
		f.is(tx.QueryRow(ctx, "select 1").Scan(), pgx.ErrTxClosed)
		f.is(tx.SendBatch(ctx, &pgx.Batch{}).Close(), pgx.ErrTxClosed)
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"c"}, pgx.CopyFromRows(nil))
		f.is(err, pgx.ErrTxClosed)
		_, err = tx.Prepare(ctx, "p", "select 1")
		f.is(err, pgx.ErrTxClosed)
		objects := tx.LargeObjects()
		_, err = objects.Create(ctx, 0)
		f.is(err, pgx.ErrTxClosed)
		_, err = tx.Begin(ctx)
		f.is(err, pgx.ErrTxClosed)
		f.is(tx.Commit(ctx), pgx.ErrTxClosed)
		f.is(tx.Rollback(ctx), pgx.ErrTxClosed)
		if tx.Conn() != nil {
			f.Error("a stale handle gives its connection away")
		}
	}
	f.want(0)
}

func testNested(f *fixture) {
	m := f.New(quick())
	f.ok(m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		f.is(m.Do(ctx, func(context.Context, pgx.Tx) error {
			f.Error("nested fn was run")
			return nil
		}), txretry.ErrNested)
		txretry.AfterCommit(tx, func() {
			f.ok(m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) }))
		})
		return f.Add(ctx, tx, 1)
	}))
	f.want(2)
}

package txretry_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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
		for range 2 { // rendered, then remembered
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

// An error that shows only later, and that nobody looks at, is still known.
func TestSwallowedByEveryMethod(t *testing.T) {
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

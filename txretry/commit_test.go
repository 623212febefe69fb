package txretry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
)

// Where pgx takes several statements for one (simple protocol), their answers
// hide that of COMMIT: never is a commit called a rollback.
func TestAtCommitWithSeveralStatements(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			txretry.AtCommit(tx, "update counter set n = 1 where id = 1; update counter set n = 2 where id = 2")
			return nil
		})
		var unknown *txretry.CommitUnknownError
		if !errors.As(err, &unknown) {
			checkNotApplied(t, pool)
		}
	})
}

func checkNotApplied(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if n, err := read(context.WithoutCancel(t.Context()), pool); err != nil || n != 0 {
		t.Errorf("called rolled back, but the counter is %d (error %v)", n, err)
	}
}

// faultyTracer panics when COMMIT has been answered.
type faultyTracer struct{}

func (faultyTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, faultyTracer{}, data.SQL)
}

func (faultyTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(faultyTracer{}) == "commit" {
		panic("boom")
	}
}

// Code of the user may run inside COMMIT. If it panics, nobody can say what
// became of the transaction, and the connection keeps no deadline.
func TestPanicDuringCommit(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	cfg := direct.Config()
	cfg.MaxConns = 1
	cfg.ConnConfig.Tracer = faultyTracer{}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var s seen
	m := newManager(t, pool, txretry.Config{CommitTimeout: time.Second, TracerProvider: tracerProvider{s: &s}})
	func() {
		defer func() {
			if recover() != "boom" {
				t.Error("the panic did not come out of Do")
			}
		}()
		_ = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return add(ctx, tx, 1)
		})
	}()
	wantCounter(t, direct, 1)
	if got := s.span["outcome"]; got != "unknown" {
		t.Errorf("outcome %s, want unknown", got)
	}
	if _, err := pool.Exec(t.Context(), "select pg_sleep(1.2)"); err != nil {
		t.Errorf("the connection was given back with the deadline of COMMIT: %v", err)
	}
}

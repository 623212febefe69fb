package inboxpgx_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// However the client sends its statements, as poolers ask for: it encodes ids, arrays and
// durations differently in each mode.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		pool := inMode(newPool(t))
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
		handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
			if e.Number == 1 {
				return errors.New("broken")
			}
			return insertEffect(ctx, tx, "a", e.Number)
		})
		m := numbered(99)
		for range 2 {
			if err := process(t, p, m); err != nil {
				t.Fatal(err)
			}
		}
		msgs := events(4)
		for range 2 {
			if got := failedOnes(p.Process(t.Context(), append(msgs, m))); !slices.Equal(got, []int{1}) {
				t.Errorf("failed %v, want the second one", got)
			}
		}
		wantOneEffectEach(t, pool, 4)
		ledgerInMode(t, p.Ledger(), m)
		if n, err := p.Prune(t.Context()); n != 0 || err != nil {
			t.Errorf("pruned %d, error %v", n, err)
		}
		if err := p.Check(t.Context()); err != nil {
			t.Errorf("Check: %v", err)
		}
	})
}

func ledgerInMode(t *testing.T, ledger driver.Ledger, m *inbox.Message) {
	t.Helper()
	err := errors.Join(ledger.Start(t.Context(), m), ledger.End(t.Context(), m), ledger.Pass(t.Context(), m), ledger.Start(t.Context(), m))
	if err != nil {
		t.Error(err)
	}
	if e, err := ledger.Look(t.Context(), m.ID); err != nil || e.Open != 1 || e.Attempt != 2 {
		t.Errorf("entry %+v, error %v", e, err)
	}
	if err := ledger.Forget(t.Context(), m.ID); err != nil {
		t.Error(err)
	}
}

package inboxpgx_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// Whoever forgets Migrate is told so by whatever is called first.
func TestErrorsBeforeMigrateNameIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for name, schema := range map[string]string{"no table": "", "no schema": "nowhere"} {
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Schema: schema})
		ledger := p.Ledger()
		handle(t, p, noEffect)
		for call, do := range map[string]func(ctx context.Context) error{
			"process": func(context.Context) error { return process(t, p, event()) },
			"process several": func(ctx context.Context) error {
				return errors.Join(p.Process(ctx, []*inbox.Message{event(), event()})...)
			},
			"look":   func(ctx context.Context) error { _, err := ledger.Look(ctx, ids.New()); return err },
			"start":  func(ctx context.Context) error { return ledger.Start(ctx, event()) },
			"end":    func(ctx context.Context) error { return ledger.End(ctx, event()) },
			"pass":   func(ctx context.Context) error { return ledger.Pass(ctx, event()) },
			"forget": func(ctx context.Context) error { return ledger.Forget(ctx, ids.New()) },
			"prune": func(ctx context.Context) error {
				_, err := p.Prune(ctx)
				return err
			},
		} {
			err := do(t.Context())
			if err == nil || !strings.Contains(err.Error(), "call Store.Migrate of inboxpgx first") {
				t.Errorf("%s, %s: %v", name, call, err)
			}
			if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
				t.Errorf("%s, %s: no PgError in %v", name, call, err)
			}
		}
	}
}

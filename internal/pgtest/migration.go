package pgtest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// SilentMigration migrates an empty schema on a connection that falls silent when it sends on, which arrives, and
// fails the test if that keeps the next process from migrating.
func SilentMigration(t *testing.T, on string, apply func(context.Context, *pgxpool.Pool) error) {
	t.Helper()
	direct := New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	far := Pool(t, proxy.URL()+"&default_query_exec_mode=exec", 2)
	proxy.SilenceOn(testenv.Silence{On: on, Deliver: true})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for proxy.Silenced() == 0 && t.Context().Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
	}()
	if err := apply(ctx, far); err == nil || proxy.Silenced() != 1 {
		t.Fatalf("%d connections fell silent: %v", proxy.Silenced(), err)
	}
	testenv.Eventually(t, func() error { return apply(t.Context(), direct) })
}

package outboxpgx_test

import (
	"context"
	"testing"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// A transaction that is prepared keeps its locks and its name among their holders, without a session.
func TestFloorsWaitForPreparedTransactions(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres, "-c", "max_prepared_transactions=2")
	f := setupOn(t, pgtest.Pool(t, server.URL(), 8), outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	f.raiseFloors(t, relay)
	conn, err := f.pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	late, err := conn.Begin(t.Context())
	must(t, err)
	seq := f.writeLate(t, late)
	f.raiseFloors(t, relay)
	_, err = conn.Exec(t.Context(), `PREPARE TRANSACTION 'late'`)
	must(t, err)
	defer func() { _, _ = f.pool.Exec(context.WithoutCancel(t.Context()), `ROLLBACK PREPARED 'late'`) }()
	f.raiseFloors(t, relay)
	f.raiseFloors(t, relay)
	f.wantLateFirst(t, relay, publisher, seq, func() error {
		_, err := f.pool.Exec(t.Context(), `COMMIT PREPARED 'late'`)
		return err
	})
}

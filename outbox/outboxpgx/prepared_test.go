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
	f := setupOn(t, pgtest.Pool(t, server.URL(), 8), outboxpgx.SourceConfig{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	f.raiseFloors(t, relay)
	conn, err := f.pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	late, err := conn.Begin(t.Context())
	must(t, err)
	must(t, f.writer.Write(t.Context(), late, outbox.Message{Name: "late", Key: "k", Body: []byte("1")}))
	var seq int64
	must(t, late.QueryRow(t.Context(), `SELECT seq FROM holdfast_outbox WHERE ordering_key = 'k'`).Scan(&seq))
	f.raiseFloors(t, relay)
	_, err = conn.Exec(t.Context(), `PREPARE TRANSACTION 'late'`)
	must(t, err)
	defer func() { _, _ = f.pool.Exec(context.WithoutCancel(t.Context()), `ROLLBACK PREPARED 'late'`) }()
	f.raiseFloors(t, relay)
	f.raiseFloors(t, relay)
	if _, high := f.floors(t); high > seq {
		t.Errorf("a floor is at %d, and %d is not committed yet", high, seq)
	}
	before := len(publisher.Received())
	_, err = f.pool.Exec(t.Context(), `COMMIT PREPARED 'late'`)
	must(t, err)
	f.write(t, outbox.Message{Name: "early", Key: "k", Body: []byte("2")})
	drain(t, relay, 2)
	if got := publisher.Received()[before:]; got[0].Name != "late" {
		t.Errorf("received %+v", got)
	}
	f.raiseFloors(t, relay)
	f.raiseFloors(t, relay)
	if _, high := f.floors(t); high <= seq {
		t.Errorf("the floors stay below %d after the commit", high)
	}
}

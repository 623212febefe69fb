package expirypgx_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// withOutbox is a backend whose events are the messages in an outbox, as they are
// for a user.
func withOutbox(t *testing.T, pool *pgxpool.Pool) *backend {
	t.Helper()
	b := &backend{pool: pool}
	b.exec(t, schema)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	b.exec(t, "DROP TABLE events")
	b.exec(t, "CREATE VIEW events AS SELECT ordering_key AS hold_id, id AS event_id, created_at AS at FROM holdfast_outbox")
	return b
}

type emit = func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

// toOutbox has the writer of an outbox store a message of every row, which it
// sends together with COMMIT.
func toOutbox(pool *pgxpool.Pool) (emit, error) {
	writer, err := outboxpgx.New(pool, outboxpgx.Config{PollOnly: true})
	if err != nil {
		return nil, err
	}
	return expirypgx.Messages(writer.Write, func(row expiry.Row) (outbox.Message, error) {
		body, err := json.Marshal(map[string]string{"hold": row.ID})
		return outbox.Message{
			ID: expiry.EventID("hold.expired", row.ID, row.Deadline), Name: "hold.expired", Key: row.ID,
			Body: body, ContentType: "application/json",
		}, err
	}), nil
}

func mustOutbox(t *testing.T, pool *pgxpool.Pool) emit {
	t.Helper()
	write, err := toOutbox(pool)
	must(t, err)
	return write
}

// The events of the tests that race and kill are what a user's outbox holds: the
// id of the expiry, in the batch's own transaction.
func TestMessagesGoToTheOutbox(t *testing.T) {
	t.Parallel()
	b := withOutbox(t, pgtest.New(t))
	b.fill(t, 3)
	if r := sweep(t, b.Store(t, mustOutbox(t, b.pool)), expiry.SweeperConfig{BatchSize: 2}); r.Expired != 3 {
		t.Errorf("got %+v, want three rows", r)
	}
	rows, err := b.pool.Query(t.Context(), "SELECT h.id, h.expires_at, e.event_id::text FROM holds h JOIN events e ON e.hold_id = h.id")
	must(t, err)
	var row expiry.Row
	var event string
	n := 0
	_, err = pgx.ForEachRow(rows, []any{&row.ID, &row.Deadline, &event}, func() error {
		n++
		if want := expiry.EventID("hold.expired", row.ID, row.Deadline).String(); event != want {
			t.Errorf("the message of row %s has the id %s, want %s", row.ID, event, want)
		}
		return nil
	})
	if err != nil || n != 3 {
		t.Errorf("%d messages, %v, want three", n, err)
	}
}

package archtest_test

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// The code of the README, so that the compiler reads it too: TestDocs finds
// every Go block of a document in some Go file.

var _ = []any{writerSnippet, relaySnippet, inboxSnippet, middlewareSnippet, expirySnippet}

type order struct {
	ID string `json:"id"`
}

func writerSnippet(ctx context.Context, pool *pgxpool.Pool, o order) error {
	// snippet: write
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		return err
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	if err != nil {
		return err
	}
	err = manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", o.ID); err != nil {
			return err
		}
		m, err := outbox.NewMessage("order.placed", o)
		if err != nil {
			return err
		}
		m.Key = o.ID // messages of one order stay in order
		return store.Write(ctx, tx, m)
	})
	// end
	return err
}

func relaySnippet(ctx context.Context, store *outboxpgx.Store, dial func(context.Context) (*amqp.Connection, error)) error {
	// snippet: relay
	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop"})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return relay.Run(ctx) // until ctx is cancelled, whatever fails
	// end
}

func inboxSnippet(ctx context.Context, manager *txretry.Manager, dial func(context.Context) (*amqp.Connection, error)) error {
	// snippet: inbox
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return err
	}
	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o order) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id) VALUES ($1)", o.ID)
		return err
	})
	if err != nil {
		return err
	}
	consumer, err := inboxamqp.NewConsumer(dial, "billing.orders", books, inboxamqp.Config{
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
	})
	if err != nil {
		return err
	}
	if err := consumer.Setup(ctx); err != nil { // or declare the queues yourself
		return err
	}
	return consumer.Run(ctx)
	// end
}

func middlewareSnippet(client goredis.UniversalClient, handler http.Handler) (http.Handler, error) {
	// snippet: middleware
	store, err := idempotencyredis.New(client, idempotencyredis.Config{})
	if err != nil {
		return nil, err
	}
	user := ratelimit.HeaderKey("X-User-Id") // as authentication leaves it
	once, err := idempotency.NewMiddleware(store, user, idempotency.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{})
	if err != nil {
		return nil, err
	}
	limited, err := ratelimit.NewMiddleware(limiter, func(r *http.Request) ([]ratelimit.Charge, error) {
		id, err := user(r)
		return []ratelimit.Charge{
			{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: id},
			{Limit: ratelimit.Limit{Name: "global", Max: 1000}},
		}, err
	}, ratelimit.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	return idempotency.RequireKey(idempotency.MiddlewareConfig{})(limited(once(handler))), nil
	// end
}

func expirySnippet(ctx context.Context, manager *txretry.Manager, messages *outboxpgx.Store) error {
	// snippet: expiry
	holds, err := expirypgx.New(manager, "holds", expirypgx.Config{
		Emit: expirypgx.Messages(messages.Write, func(row expiry.Row) (outbox.Message, error) {
			m, err := outbox.NewMessage("hold.expired", map[string]any{"hold": row.ID, "deadline": row.Deadline})
			m.ID = expiry.EventID("hold.expired", row.ID, row.Deadline) // the same id if it is ever repeated
			return m, err
		}),
	})
	if err != nil {
		return err
	}
	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
	if err != nil {
		return err
	}
	return sweeper.Run(ctx)
	// end
}

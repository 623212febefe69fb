package archtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

type order struct {
	ID string `json:"id"`
}

// The code of examples/guides, so that the compiler reads it too.

var _ = []any{newPool, newRedis, behindPooler, doctor, placeOrder, relaying, billing, markers}

func newPool(ctx context.Context, url, name string, conns int32) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = conns
	cfg.ConnConfig.RuntimeParams["application_name"] = name // who is who in pg_stat_activity
	cfg.MaxConnLifetime = 30 * time.Minute                  // servers that were added or replaced get their share
	cfg.MaxConnLifetimeJitter = 5 * time.Minute             // and not all at once
	txretry.PreparePool(cfg)                                // bounds what pgxpool leaves without
	return pgxpool.NewWithConfig(ctx, cfg)
}

func newRedis(url string) (*goredis.Client, error) {
	options, err := goredis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	options.ContextTimeoutEnabled = true // a call ends with its context, whatever hangs
	return goredis.NewClient(options), nil
}

func behindPooler(direct, pooled *pgxpool.Pool) (store *outboxpgx.Store, err error) {
	// in the process of the relay: past the pooler, so that it can LISTEN
	store, err = outboxpgx.New(direct, outboxpgx.Config{})
	// or: relays look once a second, and nobody notifies
	store, err = outboxpgx.New(pooled, outboxpgx.Config{PollOnly: true})
	return store, err
}

func doctor(ctx context.Context, out io.Writer, checks ...func(context.Context) error) (well bool) {
	well = true
	for _, look := range checks {
		if err := look(ctx); err != nil {
			fmt.Fprintln(out, err) // one line for each finding, with what mends it
			well = false
		}
	}
	return well
}

var errNoFunds = errors.New("no funds")

func placeOrder(ctx context.Context, manager *txretry.Manager, store *outboxpgx.Store, o order) error {
	return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", o.ID); err != nil {
			return err
		}
		m, err := outbox.NewMessage("order.placed", o)
		if err != nil {
			return err
		}
		m.Key = o.ID                              // messages of one order stay in order
		m.NotBefore = time.Now().Add(time.Minute) // a delay, if it is to have one
		return store.Write(ctx, tx, m)
	})
}

func relaying(ctx context.Context, store *outboxpgx.Store, publisher *outboxamqp.Publisher) error {
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return relay.Run(ctx) // publishes, listens, prunes, keeps the broker's connection; until ctx ends
}

func billing(dial func(context.Context) (*amqp.Connection, error), manager *txretry.Manager) (*inboxamqp.Consumer, error) {
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o order) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id) VALUES ($1)", o.ID)
		return err // nil: commit, then acknowledge; an error: roll back, then retry or dead letter
	})
	if err != nil {
		return nil, err
	}
	return inboxamqp.NewConsumer(dial, "billing.orders", books, inboxamqp.Config{
		ConsumerConfig: inbox.ConsumerConfig{
			Retry:     inbox.RetryPolicy{MaxAttempts: 4, BaseDelay: time.Second, Multiplier: 3},
			TimeLimit: time.Hour, MemoryLimit: 256 << 20, // then a supervisor starts it afresh
		},
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
	})
}

func markers(err error) error {
	switch {
	case errors.Is(err, errNoFunds):
		return inbox.Unrecoverable(err) // a dead letter at once
	case errors.Is(err, context.DeadlineExceeded):
		return inbox.Recoverable(err) // retried until it is a day old
	}
	return inbox.RetryAfter(err, 10*time.Minute)
}

// Firstservice is the service of examples/guides/first-service.md: people sign up, get one mail, and are
// forgotten unless they confirm.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

const tables = `
	CREATE TABLE IF NOT EXISTS signups (
		id uuid PRIMARY KEY, email text NOT NULL, status text NOT NULL, expires_at timestamptz NOT NULL);
	CREATE INDEX IF NOT EXISTS signups_due ON signups (expires_at, id) WHERE status = 'open';
	CREATE TABLE IF NOT EXISTS mails (signup uuid NOT NULL, receipt text NOT NULL);
	CREATE TABLE IF NOT EXISTS tally (event text PRIMARY KEY, n int NOT NULL)`

type signup struct {
	ID    string `json:"id"`
	Email string `json:"email"`
}

type app struct {
	manager       *txretry.Manager
	outbox        *outboxpgx.Store
	mailer, stats *inboxpgx.Store
	signups       *expirypgx.Store
}

var keep = flag.Duration("keep", time.Hour, "how long a signup may stay unconfirmed")

// create is POST /signups.
func (a app) create(w http.ResponseWriter, r *http.Request) {
	s := signup{ID: uuid.NewString(), Email: r.FormValue("email")}
	err := a.manager.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
		var deadline time.Time
		const insert = "INSERT INTO signups VALUES ($1, $2, 'open', now() + $3::interval) RETURNING expires_at"
		if err := tx.QueryRow(ctx, insert, s.ID, s.Email, *keep).Scan(&deadline); err != nil {
			return err
		}
		a.signups.Due(tx, deadline) // wakes the sweeper of step 6 on time
		m, err := outbox.NewMessage("signup.created", s)
		if err != nil {
			return err
		}
		return a.outbox.Write(ctx, tx, m)
	})
	if err != nil {
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, s.ID)
}

// confirm is POST /signups/{id}/confirm.
func (a app) confirm(w http.ResponseWriter, r *http.Request) {
	var n int64
	err := a.manager.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
		const update = "UPDATE signups SET status = 'confirmed' WHERE id = $1 AND status = 'open' AND expires_at > now()"
		tag, err := tx.Exec(ctx, update, r.PathValue("id"))
		n = tag.RowsAffected()
		return err
	})
	if err != nil || n == 0 {
		http.Error(w, "unknown or too late", http.StatusConflict)
	}
}

// send calls your mail service. It may run again after a crash.
func send(_ context.Context, s signup) (receipt string, err error) {
	log.Printf("mail to %s", s.Email)
	return "accepted", nil
}

func sent(ctx context.Context, tx pgx.Tx, s signup, receipt string) error {
	_, err := tx.Exec(ctx, "INSERT INTO mails VALUES ($1, $2)", s.ID, receipt)
	return err
}

func count(event string) func(context.Context, pgx.Tx, signup) error {
	return func(ctx context.Context, tx pgx.Tx, _ signup) error {
		_, err := tx.Exec(ctx, "INSERT INTO tally VALUES ($1, 1) ON CONFLICT (event) DO UPDATE SET n = tally.n + 1", event)
		return err
	}
}

var mails = ratelimit.Limit{Name: "mails", Max: 100, Algorithm: ratelimit.TokenBucket, Burst: 5} // 100 a minute

func pace(limiter *ratelimitredis.Limiter) inbox.Waiter {
	return must(ratelimit.NewWaiter(limiter, []ratelimit.Charge{{Limit: mails}}, ratelimit.WaiterConfig{}))
}

func expired(row expiry.Row) (outbox.Message, error) {
	m, err := outbox.NewMessage("signup.expired", signup{ID: row.ID})
	m.ID = expiry.EventID("signup.expired", row.ID, row.Deadline) // a repeated message has the same id
	return m, err
}

// newApp needs Postgres only, so tests can use it.
func newApp(pool *pgxpool.Pool, turn inbox.Waiter) app {
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(outboxpgx.New(pool, outboxpgx.Config{}))
	paced := map[string]inboxpgx.HandlerConfig{"signup.created": {Waiter: turn}}
	mailer := must(inboxpgx.New(manager, "mailer", inboxpgx.Config{ByName: paced}))
	stats := must(inboxpgx.New(manager, "stats", inboxpgx.Config{}))
	check(inboxpgx.HandlePrepared(mailer, "signup.created", send, sent))
	check(inboxpgx.Handle(stats, "signup.created", count("created")))
	check(inboxpgx.Handle(stats, "signup.expired", count("expired")))
	signups := must(expirypgx.New(manager, "signups", expirypgx.Config{
		Active: "open", Emit: expirypgx.Messages(store.Write, expired),
	}))
	return app{manager, store, mailer, stats, signups}
}

// migrate creates the tables; many processes may do so at once.
func (a app) migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := a.outbox.Migrate(ctx); err != nil {
		return err
	}
	if err := a.mailer.Migrate(ctx); err != nil { // stats uses the same tables
		return err
	}
	_, err := pool.Exec(ctx, tables)
	return err
}

var addr = flag.String("addr", "127.0.0.1:8080", "where to listen")

func main() {
	flag.Parse()
	ctx, group := service.Signals(), &service.Group{}
	pool := must(pgxpool.New(ctx, os.Getenv("DATABASE_URL")))
	client := redis.NewClient(must(redis.ParseURL(os.Getenv("REDIS_URL"))))
	dial := outboxamqp.Dial(os.Getenv("AMQP_URL"), amqp.Config{})

	limiter := must(ratelimitredis.New(client, ratelimitredis.Config{}))
	a := newApp(pool, pace(limiter))
	publisher := must(outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "signups"}))
	relay := must(outbox.NewRelay(a.outbox, publisher, outbox.RelayConfig{}))
	consumer := func(box *inboxpgx.Store, messages string) *inboxamqp.Consumer {
		queue := inboxamqp.Queue{Bindings: []inboxamqp.Binding{{Exchange: "signups", Key: messages}}}
		return must(inboxamqp.NewConsumer(dial, queue, box, inbox.ConsumerConfig{}))
	}
	mailer, stats := consumer(a.mailer, "signup.created"), consumer(a.stats, "signup.*")
	sweeper := must(expiry.NewSweeper(a.signups, expiry.SweeperConfig{}))
	operated := must(page.New(operator.Config{
		Outboxes:  []operator.Outbox{{Store: a.outbox, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "mailer", Consumer: mailer, Inbox: a.mailer}, {Name: "stats", Consumer: stats, Inbox: a.stats}},
		Sweeps:    []operator.Sweep{{Name: "signups", Store: a.signups, Sweeper: sweeper}},
		Limiters:  []operator.Limiter{{Name: "mails", Limiter: limiter, Limits: []ratelimit.Limit{mails}, Keys: []string{""}}},
	}, page.Config{}))

	check(group.Prepare(ctx, "postgres", func(ctx context.Context) error { return a.migrate(ctx, pool) }))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /signups", a.create)
	mux.HandleFunc("POST /signups/{id}/confirm", a.confirm)
	mux.Handle("GET /readyz", group.Ready(map[string]func(context.Context) error{"postgres": pool.Ping}))
	mux.Handle("/operator/", http.StripPrefix("/operator", operated))
	server := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second}
	server.RegisterOnShutdown(operated.Close)
	listener := must(net.Listen("tcp", *addr))
	log.Printf("listening on %s", listener.Addr())

	group.Serve(listener, server)
	group.Add("mailer", mailer, publisher.Setup, mailer.Setup)
	group.Add("stats", stats, publisher.Setup, stats.Setup)
	group.Add("sweeper", sweeper)
	group.Last("relay", relay, publisher.Setup, mailer.Setup, stats.Setup)
	check(group.Run(ctx)) // until SIGTERM; then it stops in the right order
	pool.Close()
}

func must[T any](v T, err error) T { check(err); return v }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

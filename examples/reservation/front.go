package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// front is the listeners of a process: one address, or a second one for operators.
type front struct {
	doors []door
	// page is the operator's page; nil: none.
	page *page.Page
	// shopPage is the shop's own page; nil: none.
	shopPage *web.Page
}

// door is one address and its handler.
type door struct {
	listener net.Listener
	handler  http.Handler
}

// newFront listens, but does not serve yet.
func newFront(ctx context.Context, cfg config, b *backend, metrics http.Handler) (*front, error) {
	api, err := newAPI(cfg, b)
	if err != nil {
		return nil, err
	}
	f := &front{page: newPage(cfg, b.operator)}
	api = f.withShopPage(cfg, b, api)
	if cfg.opsAddr == "" {
		return f, f.open(ctx, "-addr", cfg.addr, f.withPage(cfg, httpapi.Ops(b.ready, metrics, api)))
	}
	return f, errors.Join(
		f.open(ctx, "-addr", cfg.addr, api),
		f.open(ctx, "-ops-addr", cfg.opsAddr, f.withPage(cfg, httpapi.Ops(b.ready, metrics, nil))))
}

// newAPI returns the handler for customers. It is nil in roles without one.
func newAPI(cfg config, b *backend) (http.Handler, error) {
	if !cfg.hasAPI() {
		return nil, nil
	}
	api := httpapi.Config{
		Shop:      booking.Shop{Hold: cfg.hold, NewID: newID},
		Backend:   b.shop,
		Keys:      b.keys,
		Limiter:   b.limiter,
		UserLimit: cfg.userLimit, GlobalLimit: cfg.globalLimit,
	}
	if cfg.traces {
		api.Trace = traced
	}
	return httpapi.New(api)
}

func (f *front) open(ctx context.Context, flag, addr string, handler http.Handler) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("%w; %s chooses another address", err, flag)
	}
	f.doors = append(f.doors, door{listener, handler})
	return nil
}

// announce prints where the process listens and, for a shop, commands to try.
func (f *front) announce(w io.Writer, cfg config) {
	url := "http://" + f.doors[0].listener.Addr().String()
	fmt.Fprintf(w, "reservation: listening on %s (backend %s, role %s)\n", url, cfg.backend, cfg.role)
	if len(f.doors) > 1 {
		fmt.Fprintf(w, "reservation: operators see http://%s\n", f.doors[1].listener.Addr())
	}
	if f.page != nil {
		fmt.Fprintf(w, "reservation: the operator's page is http://%s%s\n", f.doors[len(f.doors)-1].listener.Addr(), pagePath)
	}
	if f.shopPage != nil {
		fmt.Fprintf(w, "reservation: the shop's page is %s/\n", url)
	}
	if cfg.hasAPI() {
		printTrial(w, url)
	}
}

// join adds the HTTP servers to the group.
func (f *front) join(group *service.Group) {
	for _, d := range f.doors {
		server := newServer(d.handler)
		if f.page != nil {
			server.RegisterOnShutdown(f.page.Close)
		}
		if f.shopPage != nil {
			server.RegisterOnShutdown(f.shopPage.Close)
		}
		group.Serve(d.listener, server)
	}
}

// close stops the running actions of the operator's page, which are logged, before the servers are closed.
func (f *front) close() {
	if f.page != nil {
		f.page.Close()
	}
}

// newServer bounds how long a client can keep a connection. An answer may take the time of its body and a minute of
// work. It is short, so only a client that does not read needs the rest of WriteTimeout.
func newServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      2 * time.Minute,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
}

// withShopPage serves the shop's page in front of its API.
func (f *front) withShopPage(cfg config, b *backend, api http.Handler) http.Handler {
	if !cfg.page || !cfg.hasAPI() {
		return api
	}
	operator := ""
	if f.page != nil && cfg.opsAddr == "" {
		operator = pagePath
	}
	user, global := httpapi.Limits(cfg.userLimit, cfg.globalLimit)
	f.shopPage = must(web.New(web.Config{
		API: api, Flow: b.flow, Backlog: b.backlog, Trials: b.trials, Servers: b.outages,
		Limits:   web.Limits{Limiter: b.limiter, User: user, Global: global},
		Operator: operator,
	}))
	return f.shopPage
}

const (
	// slowKey exists while consumers are to be slow. Consumers with -trials look for it, wherever they run.
	slowKey = "{reservation.flow}:slow"
	// slowness is how long a slow consumer takes for a message.
	slowness = 2 * time.Second
	// slowFor bounds how long consumers stay slow.
	slowFor = 10 * time.Minute
	// slowTimeout bounds the look for slowKey, during which a consumer waits.
	slowTimeout = 500 * time.Millisecond
	// maxDead is how many messages may wait or be dead. Above it no more poison is sent.
	maxDead = 1000
)

// trials cause faults on real servers. They implement web.Trials.
type trials struct {
	transactor *txretry.Manager
	messages   *outboxpgx.Store
	consumer   consumer
	redis      redis.UniversalClient
}

func (p *parts) trials() trials {
	return trials{transactor: p.transactor, messages: p.messages, consumer: p.broker.consumer, redis: p.servers.redis}
}

// Poison sends a bad message through the outbox, because the consumer may be in another process.
func (t trials) Poison(ctx context.Context) error {
	depth, err := t.messages.Depth(ctx)
	if err != nil {
		return err
	}
	queue, err := t.consumer.Stats(ctx)
	if err != nil {
		return err
	}
	if n := inOutbox(depth) + inQueue(queue) + dead(depth, queue); n >= maxDead {
		return fmt.Errorf("%d messages wait or are dead, which is enough", n)
	}
	return t.transactor.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return t.messages.Write(ctx, tx, messages.Poison())
	})
}

// SlowDown implements web.Trials.
func (t trials) SlowDown(ctx context.Context, on bool) error {
	if on {
		return t.redis.Set(ctx, slowKey, 1, slowFor).Err()
	}
	return t.redis.Del(ctx, slowKey).Err()
}

// Slow implements web.Trials.
func (t trials) Slow(ctx context.Context) (bool, error) {
	n, err := t.redis.Exists(ctx, slowKey).Result()
	return n > 0, err
}

// delay returns how long a consumer waits before it processes a message. It is 0 if Redis does not answer.
func (t trials) delay(ctx context.Context) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, slowTimeout)
	defer cancel()
	if slow, err := t.Slow(ctx); err != nil || !slow {
		return 0
	}
	return slowness
}

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// After a signal the running requests have stopTimeout, then consumer and sweeper, then the relay. After that,
// connections have closeTimeout to end as their servers like it.
const (
	stopTimeout  = 18 * time.Second
	closeTimeout = 2 * time.Second
)

// runner is a part of the process that runs until it is stopped.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
}

// backend is the shop on one kind of servers, or on none.
type backend struct {
	shop    httpapi.Backend
	keys    driver.Store // nil: left out
	limiter limiter      // nil: left out
	// group has the parts of the role.
	group *service.Group
	// handled counts the messages of the parts.
	handled *handled
	// ready answers readiness probes.
	ready http.Handler
	// operator knows all parts.
	operator operator.Config
	// flow counts what the shop's page shows, and backlog what waits.
	flow    flow.Flow
	backlog func(context.Context) (flow.Backlog, error)
	// trials make trouble; nil: none are wanted. Only outages of a shop in memory are made.
	trials  web.Trials
	outages []web.Server
	close   func()
}

// limiter decides, and can be looked at.
type limiter interface {
	ratelimit.Limiter
	web.Peeker
}

// serve runs the shop in its role until ctx ends, or a limit of the process is reached.
func serve(ctx context.Context, cfg config, stdout io.Writer) error {
	metrics, stop, err := serveMetrics()
	if err != nil {
		return err
	}
	defer stop()
	flush, err := exportTraces(ctx, cfg)
	if err != nil {
		return err
	}
	defer flush()
	b, err := open(ctx, cfg)
	if ctx.Err() != nil && err != nil {
		return nil // stopped before it had begun
	}
	if err != nil {
		return err
	}
	defer b.close()
	ctx, end := cfg.limits.within(ctx, b.handled)
	defer end()
	if cfg.addr == "" {
		fmt.Fprintf(stdout, "reservation: running (backend %s, role %s)\n", cfg.backend, cfg.role)
		return b.group.Run(ctx)
	}

	front, err := newFront(ctx, cfg, b, metrics)
	if err != nil {
		return err
	}
	front.announce(stdout, cfg)
	front.join(b.group)
	defer front.close()
	return b.group.Run(ctx)
}

// newGroup returns a group with the parts of the role. The parts that need the broker set it up first; requests are
// served meanwhile.
func newGroup(cfg config, sweeper, consumer, relay runner, broker ...func(context.Context) error) *service.Group {
	group := &service.Group{DrainDelay: cfg.drain, StopTimeout: stopTimeout}
	if cfg.runs(roleSweeper) {
		group.Add(roleSweeper, sweeper)
	}
	if cfg.runs(roleConsumer) {
		group.Add(roleConsumer, consumer, broker...)
	}
	if cfg.runs(roleRelay) {
		group.Last(roleRelay, relay, broker...)
	}
	return group
}

package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// After a signal requests in hand have drainTimeout, then what runs behind them has stopTimeout, then
// connections have closeTimeout to end as their servers like it. What still hangs is left to the
// end of the process.
const (
	drainTimeout = 20 * time.Second
	stopTimeout  = 20 * time.Second
	closeTimeout = 2 * time.Second
)

// service is a part of the process that runs until it is told to stop.
type service struct {
	name string
	runner
}

type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
}

// backend is the shop on one kind of servers, or on none.
type backend struct {
	shop    httpapi.Backend
	keys    driver.Store // nil: left out
	limiter limiter      // nil: left out
	// services are those of the role.
	services []service
	// handled counts the messages of the services.
	handled *handled
	// checks ask the servers.
	checks []httpapi.Check
	// operator knows all parts.
	operator *operator.Operator
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
		return runAll(ctx, b.services, nil)
	}

	front, err := newFront(ctx, cfg, b, metrics)
	if err != nil {
		return err
	}
	front.announce(stdout, cfg)
	return runAll(ctx, b.services, front.serve)
}

// runAll runs the services, and front before them: it has ended before they are
// told to stop, so that what it still accepts is still served. Services that do
// not stop in time are an error.
func runAll(ctx context.Context, services []service, front func(context.Context) error) error {
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range services {
		group.Go(func() error {
			if err := s.Run(behind); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			return nil
		})
	}
	group.Go(func() error {
		defer stop()
		if front != nil {
			return front(ctx)
		}
		<-ctx.Done()
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- group.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-behind.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(stopTimeout):
		return fmt.Errorf("role %v did not stop within %v", names(services), stopTimeout)
	}
}

func names(services []service) []string {
	var all []string
	for _, s := range services {
		all = append(all, s.name)
	}
	return all
}

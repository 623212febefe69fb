package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// defaultStopTimeout is longer than the 60 s that a consumer gives its handlers.
const defaultStopTimeout = 70 * time.Second

// Signals returns a context that ends with the first SIGINT or SIGTERM; its cause names the signal. The second
// signal ends the process at once. Call it once, in main.
func Signals() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	received := make(chan os.Signal, 1)
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)
	go func() {
		s := <-received
		signal.Stop(received) // from now on a signal has its default effect
		cancel(fmt.Errorf("signal received: %v", s))
	}()
	return ctx
}

// Group runs the parts of a service and stops them in order. The zero value is ready to use. Set the fields and
// add the parts before Run, from one goroutine. A Group runs once and must not be copied.
type Group struct {
	// DrainDelay is the time between the first failing readiness probe and the end of the HTTP listeners. In it, load
	// balancers see the failing probe. 0: no delay. On Kubernetes use 5 s, or a preStop hook that sleeps.
	DrainDelay time.Duration
	// StopTimeout bounds the end of each stage: first the HTTP servers, then the parts of Add, then the parts of
	// Last. It must be longer than the ShutdownTimeout of each part. 0: 70 s.
	StopTimeout time.Duration
	// Logger gets the waits, the shutdown and errors. nil: slog.Default().
	Logger *slog.Logger

	mu     sync.Mutex
	state  state
	stages [3][]*part
}

// The stages, in the order of the shutdown.
const (
	stageServe = iota
	stageAdd
	stageLast
)

// state is the state of a Group.
type state int

const (
	starting state = iota
	running
	stopping
)

// Serve adds an HTTP server, which serves the connections of listener. It stops first: it closes the listener and
// waits for running requests; after StopTimeout it cuts them off, and Run returns an error. For TLS give a
// listener of crypto/tls. Functions of server.RegisterOnShutdown are called, for streams that do not end by themselves.
func (g *Group) Serve(listener net.Listener, server *http.Server) {
	g.add(stageServe, &part{
		name: "http " + listener.Addr().String(), runner: front{listener, server},
		abandon: func() { _ = server.Close() }, // nothing is left that could use the error
	})
}

// Add adds a part that stops after the HTTP servers and before the parts of Last: a consumer, a sweeper. Its Run
// blocks until its context ends, and returns nil after it has finished its work. An error after the end of its
// context counts only if it is not context.Canceled.
//
// Before Run the steps of setup are tried one after the other, each until it succeeds, while the other parts
// already run. The package documentation describes the retries. The part is ready when setup is done and its method
// Ready(ctx) error, if it has one, returns nil.
func (g *Group) Add(name string, runner interface{ Run(context.Context) error }, setup ...func(context.Context) error) {
	g.add(stageAdd, &part{name: name, runner: runner, setup: setup, abandon: func() {}})
}

// Last is Add for a part that stops after all others: a relay, which publishes the messages that the others have
// written.
func (g *Group) Last(name string, runner interface{ Run(context.Context) error }, setup ...func(context.Context) error) {
	g.add(stageLast, &part{name: name, runner: runner, setup: setup, abandon: func() {}})
}

func (g *Group) add(stage int, p *part) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p.ended = make(chan struct{})
	g.stages[stage] = append(g.stages[stage], p)
}

// Run starts all parts and blocks until ctx ends or a part ends. Then it stops them in order and returns. It
// returns nil if every part ended because it was stopped, and in time. Otherwise the error has a line for each part
// that failed, panicked, ended by itself, or did not stop within StopTimeout. An abandoned part may still use
// its connections: after an error end the process without waiting for pools to close.
//
// Before anything is started, Run returns an error for parts without a name or with the same name, negative
// times, a Group without parts, and a second call.
func (g *Group) Run(ctx context.Context) error {
	if err := g.begin(); err != nil {
		return err
	}
	detached := context.WithoutCancel(ctx)
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	for _, stage := range g.stages {
		for _, p := range stage {
			p.start(detached, g, end)
		}
	}
	<-ctx.Done()
	g.enter(stopping)
	g.logger().InfoContext(detached, "stopping", slog.Any("cause", context.Cause(ctx)))
	<-time.After(g.DrainDelay)
	var failed []error
	for _, stage := range g.stages {
		failed = append(failed, g.stop(detached, stage)...)
	}
	return errors.Join(failed...)
}

// begin checks the settings of the user.
func (g *Group) begin() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var wrong []error
	if g.state != starting {
		wrong = append(wrong, errors.New("service: Run was called before"))
	}
	if g.DrainDelay < 0 {
		wrong = append(wrong, fmt.Errorf("service: DrainDelay is negative: %v", g.DrainDelay))
	}
	if g.StopTimeout < 0 {
		wrong = append(wrong, fmt.Errorf("service: StopTimeout is negative: %v", g.StopTimeout))
	}
	names := map[string]bool{}
	for _, p := range g.parts() {
		if p.name == "" || names[p.name] {
			wrong = append(wrong, fmt.Errorf("service: the name %q of a part is empty or taken", p.name))
		}
		names[p.name] = true
	}
	if len(names) == 0 {
		wrong = append(wrong, errors.New("service: nothing to run: no part was added"))
	}
	if len(wrong) == 0 {
		g.state = running
	}
	return errors.Join(wrong...)
}

func (g *Group) parts() []*part { return slices.Concat(g.stages[:]...) }

func (g *Group) enter(s state) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state = s
}

// stop stops the parts of a stage, all at once. It returns the errors of parts that failed or did not stop.
func (g *Group) stop(ctx context.Context, stage []*part) []error {
	timeout := cmp.Or(g.StopTimeout, defaultStopTimeout)
	deadline, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for _, p := range stage {
		p.stop()
	}
	var failed []error
	for _, p := range stage {
		select {
		case <-p.ended:
		case <-deadline.Done():
		}
		if !p.hasEnded() {
			g.logger().ErrorContext(ctx, "part did not stop", slog.String("part", p.name), slog.Duration("timeout", timeout))
			failed = append(failed, fmt.Errorf("service: %s: did not stop within %v", p.name, timeout))
			p.abandon()
			continue
		}
		if p.err != nil {
			failed = append(failed, fmt.Errorf("service: %s: %w", p.name, p.err))
		}
	}
	return failed
}

func (g *Group) logger() *slog.Logger {
	return cmp.Or(g.Logger, slog.Default())
}

// part is one part of the service.
type part struct {
	name   string
	setup  []func(context.Context) error
	runner interface{ Run(context.Context) error }
	// abandon is called if the part has not ended in time.
	abandon func()

	prepared atomic.Bool // setup is done
	stop     context.CancelFunc
	ended    chan struct{}
	err      error // of the part; set when ended is closed
}

var (
	errByItself = errors.New("ended without being stopped")
	errGoexit   = errors.New("ended by runtime.Goexit")
)

// start runs the part in its own goroutine. When the part ends, the service ends.
func (p *part) start(ctx context.Context, g *Group, end context.CancelCauseFunc) {
	ctx, p.stop = context.WithCancel(ctx)
	go func() {
		defer func() {
			close(p.ended)
			if p.err != nil {
				end(fmt.Errorf("part %s ended: %w", p.name, p.err))
			}
		}()
		p.err = errGoexit
		p.err = p.run(ctx, g)
	}()
}

// hasEnded reports whether the part has ended.
func (p *part) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// run runs setup, then the part's Run.
func (p *part) run(ctx context.Context, g *Group) (err error) {
	defer func() {
		if v := recover(); v != nil {
			g.logger().ErrorContext(ctx, "part panicked", slog.String("part", p.name), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	err = g.prepare(ctx, p.name, p.setup)
	if err == nil {
		p.prepared.Store(true)
		err = p.runner.Run(ctx)
	}
	switch {
	case err == nil && ctx.Err() == nil:
		return errByItself
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return nil
	}
	return err
}

var errSetup = errors.New("setup is not done")

// ready returns nil, or the reason why the part is not ready.
func (p *part) ready(ctx context.Context) error {
	if !p.prepared.Load() {
		return errSetup
	}
	if r, ok := p.runner.(interface{ Ready(context.Context) error }); ok {
		return r.Ready(ctx)
	}
	return nil
}

// front is an HTTP server on its listener.
type front struct {
	listener net.Listener
	server   *http.Server
}

// Run serves until ctx ends and the running requests are done.
func (f front) Run(ctx context.Context) error {
	drained := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(drained)
		_ = f.server.Shutdown(context.WithoutCancel(ctx)) // only the listener can fail, and it is closed anyway
	})
	err := f.server.Serve(f.listener)
	if stop() || !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-drained
	return nil
}

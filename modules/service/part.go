package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync/atomic"
)

// part is one thing that runs.
type part struct {
	name   string
	setup  []func(context.Context) error
	runner interface{ Run(context.Context) error }
	// abandon is called when the part has not ended in time.
	abandon func()

	prepared atomic.Bool // setup is done
	stop     context.CancelFunc
	ended    chan struct{}
	err      error // why it ended, once ended is closed
}

var (
	errByItself = errors.New("ended without being stopped")
	errGoexit   = errors.New("ended by runtime.Goexit")
)

// start runs the part in a goroutine of its own. When it ends, the service does.
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

// run is the life of the part: setup, then its Run.
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

// ready returns why the part is not ready.
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
		_ = f.server.Shutdown(context.WithoutCancel(ctx)) // the error is that of a listener which is closed anyway
	})
	err := f.server.Serve(f.listener)
	if stop() || !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-drained
	return nil
}

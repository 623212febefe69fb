package amqpconn

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// PublisherConfig configures a Publisher. Zero values take the defaults.
type PublisherConfig struct {
	Dial    Dial
	Timeout time.Duration // of the dial and of every call; 0 means 10 s
	Logger  *slog.Logger  // nil means slog.Default()

	// Window is how many messages may await their confirm; 0 means 500.
	Window int
	// ConfirmTimeout is how long a message may do so; 0 means 15 s.
	ConfirmTimeout time.Duration
	// ShutdownTimeout is how long Run waits for open confirms once ctx is cancelled; 0 means 10 s.
	ShutdownTimeout time.Duration
	// Down is told of every failed attempt to connect and every ended session. It may be nil.
	Down func(err error)
}

// Out is one message on its way to the broker. It is published mandatory.
type Out struct {
	Exchange, Key string
	Message       amqp.Publishing
}

// Publisher publishes with confirms in a sliding window, on a connection of its
// own. Its methods may be called from any goroutine.
type Publisher struct {
	cfg PublisherConfig

	mu      sync.Mutex
	window  *window       // nil while there is no session
	changed chan struct{} // closed when the outcome of the first attempt is known
	err     error         // why there is no session
}

var errNotRunning = errors.New("the publisher is not running")

// NewPublisher returns a publisher that connects once Run is called.
func NewPublisher(cfg PublisherConfig) *Publisher {
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	cfg.Window = cmp.Or(cfg.Window, 500)
	cfg.ConfirmTimeout = cmp.Or(cfg.ConfirmTimeout, 15*time.Second)
	cfg.ShutdownTimeout = cmp.Or(cfg.ShutdownTimeout, 10*time.Second)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return &Publisher{cfg: cfg, changed: make(chan struct{}), err: errNotRunning}
}

// Run keeps a session open until ctx is cancelled. It then takes no more
// messages, waits for the open confirms and closes the connection.
func (p *Publisher) Run(ctx context.Context) {
	defer p.set(nil, errNotRunning)
	Loop(ctx, LoopConfig{
		Dial: p.cfg.Dial, Timeout: p.cfg.Timeout, Logger: p.cfg.Logger,
		Down: func(err error) {
			p.set(nil, err)
			if p.cfg.Down != nil {
				p.cfg.Down(err)
			}
		},
	}, func(ctx context.Context, conn *Conn) error {
		w, err := openWindow(conn, p.cfg)
		if err != nil {
			return err
		}
		p.set(w, nil)
		return w.run(ctx, func() { p.set(nil, errNotRunning) })
	})
}

func (p *Publisher) set(w *window, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.window, p.err = w, err
	select {
	case <-p.changed:
	default:
		close(p.changed)
	}
}

// Ready returns nil while there is a session that the broker has not blocked.
func (p *Publisher) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.window == nil {
		return unavailable(p.err)
	}
	if reason, isBlocked := p.window.conn.Blocked(); isBlocked {
		return blocked(reason)
	}
	return nil
}

// Publish sends a message and calls done exactly once, with nil when the broker
// has confirmed it and else with one of the package's errors. It may wait while
// the window is full, until ctx is cancelled; what is not confirmed by then is
// reported as ErrUnavailable soon after. Messages of one caller are sent in the
// order of its calls. Without a session it fails at once; only the outcome
// of the very first attempt to connect is waited for, no longer than the
// Timeout. Done must neither wait nor publish.
func (p *Publisher) Publish(ctx context.Context, out Out, done func(error)) {
	if err := validate(out); err != nil {
		done(err)
		return
	}
	w, err := p.session(ctx)
	if err == nil {
		err = w.exchanges.check(out.Exchange)
	}
	if err == nil {
		err = w.reserve(ctx)
	}
	if err != nil {
		done(err)
		return
	}
	w.enqueue(&entry{ctx: ctx, out: out, done: done, since: time.Now()})
}

// Confirmed publishes and waits for the outcome.
func (p *Publisher) Confirmed(ctx context.Context, out Out) error {
	outcome := make(chan error, 1)
	p.Publish(ctx, out, func(err error) { outcome <- err })
	return <-outcome
}

// session returns the open window. The outcome of the first attempt is waited for.
func (p *Publisher) session(ctx context.Context) (*window, error) {
	select {
	case <-p.changed:
	default:
		if err := p.firstAttempt(ctx); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.window == nil {
		return nil, unavailable(p.err)
	}
	return p.window, nil
}

func (p *Publisher) firstAttempt(ctx context.Context) error {
	timer := time.NewTimer(p.cfg.Timeout)
	defer timer.Stop()
	select {
	case <-p.changed:
	case <-timer.C:
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	return nil
}

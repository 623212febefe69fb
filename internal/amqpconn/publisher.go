package amqpconn

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// PublisherConfig configures a Publisher. Zero values take the defaults.
type PublisherConfig struct {
	Dial    Dial
	Timeout time.Duration // of the dial and of every call; 0 means 10 s
	Logger  *slog.Logger  // nil means slog.Default()

	// Window is how many messages may await their confirm; 0 means 500.
	Window int
	// Channels is over how many channels they are spread; 0 means 1. The broker serves each
	// with a process of its own.
	Channels int
	// ConfirmTimeout is how long a message may do so; 0 means 15 s.
	ConfirmTimeout time.Duration
	// ShutdownTimeout is how long Run waits for open confirms once ctx is cancelled; 0 means 10 s.
	ShutdownTimeout time.Duration
	// Down receives every failed attempt to connect and every ended session. Optional.
	Down func(err error)
	// Up is called each time the publisher becomes ready: a session begins, or the broker no
	// longer blocks it. It may be nil.
	Up func()
}

// Out is one message on its way to the broker. It is published mandatory.
type Out struct {
	// Stripe chooses the channel. Messages of one stripe keep their order.
	Stripe        uint32
	Exchange, Key string
	Message       amqp.Publishing
}

// Publisher publishes with confirms in a sliding window, on a connection of its
// own. Its methods may be called from any goroutine.
type Publisher struct {
	cfg      PublisherConfig
	suspects *suspects
	again    sync.WaitGroup // goroutines that publish once more
	refusals telemetry.Seldom

	mu      sync.Mutex
	session *session      // nil while there is none
	err     error         // why there is no session
	soon    bool          // one is on its way: its outcome is waited for
	changed chan struct{} // closed and replaced when one of these changes
}

var errNotRunning = errors.New("the publisher is not running")

// NewPublisher returns a publisher that connects once Run is called.
func NewPublisher(cfg PublisherConfig) *Publisher {
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	cfg.Window = cmp.Or(cfg.Window, 500)
	cfg.Channels = cmp.Or(cfg.Channels, 1)
	cfg.ConfirmTimeout = cmp.Or(cfg.ConfirmTimeout, 15*time.Second)
	cfg.ShutdownTimeout = cmp.Or(cfg.ShutdownTimeout, 10*time.Second)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return &Publisher{cfg: cfg, suspects: newSuspects(), changed: make(chan struct{}), err: errNotRunning, soon: true}
}

// Run keeps a session open until ctx is cancelled. It then takes no more
// messages, waits for the open confirms and closes the connection.
func (p *Publisher) Run(ctx context.Context) {
	defer p.again.Wait()
	defer p.set(nil, errNotRunning)
	Loop(ctx, LoopConfig{
		Dial: p.cfg.Dial, Timeout: p.cfg.Timeout, Logger: p.cfg.Logger,
		Down: func(err error) {
			p.set(nil, err)
			if p.cfg.Down != nil {
				p.cfg.Down(err)
			}
		},
	}, p.serve)
}

// serve publishes on one connection.
func (p *Publisher) serve(ctx context.Context, conn *Conn) error {
	conn.onUnblock(p.up)
	s, err := openSession(ctx, conn, p)
	if err != nil {
		return err
	}
	defer s.facts.close()
	defer conn.Close()
	p.set(s, nil)
	p.up()
	return s.run(ctx, func() { p.set(nil, errNotRunning) })
}

func (p *Publisher) up() {
	if p.cfg.Up != nil {
		p.cfg.Up()
	}
}

func (p *Publisher) set(s *session, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.session, p.err, p.soon = s, err, errors.Is(err, errRefused)
	close(p.changed)
	p.changed = make(chan struct{})
}

// Ready returns nil while there is a session that the broker has not blocked.
func (p *Publisher) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == nil {
		return unavailable(p.err)
	}
	if reason, isBlocked := p.session.conn.Blocked(); isBlocked {
		return blocked(reason)
	}
	return nil
}

// Window returns how many messages await their confirm, and how many may.
func (p *Publisher) Window() (used, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != nil {
		used = len(p.session.slots)
	}
	return used, p.cfg.Window
}

// Publish sends a message and calls done exactly once, with nil when the broker
// has confirmed it and else with one of the package's errors. It may wait while
// the window is full, until ctx is cancelled; what is not confirmed by then is
// reported as ErrUnavailable soon after. Messages of one caller and stripe are sent in
// the order of its calls, except that those which were on their way when the broker refused
// another message are sent once more. Without a session it fails at once; only the outcome
// of the very first attempt to connect, and of the one after a refusal, is waited for, no longer
// than the Timeout. Done must neither wait nor publish.
func (p *Publisher) Publish(ctx context.Context, out Out, done func(error)) {
	if err := validate(out); err != nil {
		done(err)
		return
	}
	p.publish(&entry{ctx: ctx, out: out, answer: done})
}

func (p *Publisher) publish(e *entry) {
	var over *session
	for {
		s, err := p.current(e.ctx, over)
		if err == nil {
			err = s.publish(e)
		}
		switch {
		case err == nil:
			return
		case errors.Is(err, errRefused): // over another message
			over = s
		default:
			e.answer(err)
			return
		}
	}
}

// publishAgain publishes messages that were not at fault when their channel was closed.
func (p *Publisher) publishAgain(rest []*entry) {
	if len(rest) == 0 {
		return
	}
	p.again.Go(func() {
		for _, e := range rest {
			p.publish(e)
		}
	})
}

// Confirmed publishes and waits for the outcome.
func (p *Publisher) Confirmed(ctx context.Context, out Out) error {
	outcome := make(chan error, 1)
	p.Publish(ctx, out, func(err error) { outcome <- err })
	return <-outcome
}

// current returns the open session that is not over, and waits for one that is on its way.
func (p *Publisher) current(ctx context.Context, over *session) (*session, error) {
	var timeout <-chan time.Time
	for {
		p.mu.Lock()
		s, err, soon, changed := p.session, p.err, p.soon, p.changed
		p.mu.Unlock()
		switch {
		case s != nil && s != over:
			return s, nil
		case s == nil && !soon:
			return nil, unavailable(err)
		case timeout == nil:
			timer := time.NewTimer(p.cfg.Timeout)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-changed:
		case <-timeout:
			return nil, unavailable(err)
		case <-ctx.Done():
			return nil, unavailable(ctx.Err())
		}
	}
}

package outboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const scope = "github.com/holdfast-go/holdfast/outbox/outboxamqp"

// channels is how many channels a connection publishes on. The broker serves each with a
// process of its own: four bring a quarter more than one on a quorum queue, and as much as
// several connections do.
const channels = 4

// Config configures a Publisher. The zero value publishes to the default
// exchange, where the routing key names the queue.
type Config struct {
	// Exchange is used for messages that the Router sends to none.
	Exchange string
	// Router chooses exchange, routing key and further headers. Nil means outbox.Routes{}:
	// the routing key is the message's name.
	Router outbox.Router
	// Compat adds the headers that Symfony Messenger reads.
	Compat bool

	// Window is how many messages may await their confirm, at most 65535. 0 means 1000,
	// two batches of a relay: a window that is always full gains a twelfth on a quorum queue.
	Window int
	// MaxBodyBytes refuses larger bodies as permanent failures, at most 128 MiB. 0 means
	// 16 MiB, the broker's own limit since RabbitMQ 4.0.
	MaxBodyBytes int
	// CallTimeout bounds the dial and every call to the broker. 0 means 10 s.
	CallTimeout time.Duration
	// ConfirmTimeout bounds the wait for a confirm. When it passes, the connection is
	// replaced. 0 means 15 s.
	ConfirmTimeout time.Duration
	// ShutdownTimeout is how long Run waits for open confirms when its context is
	// cancelled. 0 means 10 s.
	ShutdownTimeout time.Duration

	// Logger is told of lost connections. Nil means slog.Default().
	Logger *slog.Logger
	// MeterProvider counts lost connections. Nil means the global one.
	MeterProvider metric.MeterProvider
}

func (c Config) withDefaults() Config {
	c.Window = cmp.Or(c.Window, 1000)
	c.MaxBodyBytes = cmp.Or(c.MaxBodyBytes, 16<<20)
	c.CallTimeout = cmp.Or(c.CallTimeout, 10*time.Second)
	c.ConfirmTimeout = cmp.Or(c.ConfirmTimeout, 15*time.Second)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 10*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Router == nil {
		c.Router = outbox.Routes{}
	}
	return c
}

func (c Config) validate() error {
	var problems []error
	if c.Window < 1 || c.Window > 65535 {
		problems = append(problems, fmt.Errorf("outboxamqp: Config.Window %d is not from 1 to 65535", c.Window))
	}
	if c.MaxBodyBytes < 1 || c.MaxBodyBytes > amqpconn.MaxBody {
		problems = append(problems, fmt.Errorf("outboxamqp: Config.MaxBodyBytes %d is not from 1 to %d", c.MaxBodyBytes, amqpconn.MaxBody))
	}
	for _, d := range [...]struct {
		name  string
		value time.Duration
	}{{"CallTimeout", c.CallTimeout}, {"ConfirmTimeout", c.ConfirmTimeout}, {"ShutdownTimeout", c.ShutdownTimeout}} {
		if d.value < 0 {
			problems = append(problems, fmt.Errorf("outboxamqp: Config.%s %v is negative", d.name, d.value))
		}
	}
	return errors.Join(problems...)
}

// Publisher is a driver.Publisher. Its methods may be called from any goroutine.
type Publisher struct {
	cfg  Config
	dial amqpconn.Dial
	out  *amqpconn.Publisher

	mu        sync.Mutex
	runs      int         // calls of Run
	current   *connection // of those
	listeners map[*func()]bool
}

// NewPublisher returns a publisher that connects by dial once Run is called.
// Every call of dial must open a new connection, without the client's own recovery.
func NewPublisher(dial func(ctx context.Context) (*amqp.Connection, error), cfg Config) (*Publisher, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if dial == nil {
		err = errors.Join(errors.New("outboxamqp: dial is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	kit := telemetry.New(scope, nil, cfg.MeterProvider)
	lost, err := kit.Meter.Int64Counter("holdfast.outbox.amqp.lost_sessions",
		metric.WithDescription("Connections to RabbitMQ that failed or could not be opened"))
	if err != nil {
		return nil, fmt.Errorf("outboxamqp: %w", err)
	}
	p := &Publisher{cfg: cfg, dial: dial, listeners: map[*func()]bool{}}
	p.out = amqpconn.NewPublisher(amqpconn.PublisherConfig{
		Dial: dial, Timeout: cfg.CallTimeout, Logger: cfg.Logger.With(slog.String("component", "outboxamqp")),
		Window: cfg.Window, Channels: channels, ConfirmTimeout: cfg.ConfirmTimeout, ShutdownTimeout: cfg.ShutdownTimeout,
		Down: func(error) { lost.Add(context.Background(), 1) },
		Up:   p.up,
	})
	return p, nil
}

// connection is one life of the publisher, from the first Run to the end of the last.
type connection struct {
	stop  context.CancelFunc
	ended chan struct{}
}

// Run implements driver.Service; a relay calls it. It keeps a connection open until ctx ends. The last
// of several Runs then refuses further messages as unavailable, and waits up to Config.ShutdownTimeout
// for the confirms still open. It returns nil. The broker may be down when it starts, or go down
// later: Run goes on trying.
func (p *Publisher) Run(ctx context.Context) error {
	c := p.join(context.WithoutCancel(ctx))
	select {
	case <-ctx.Done():
	case <-c.ended:
	}
	if p.leave() {
		c.stop()
		<-c.ended
	}
	return nil
}

// join opens the connection where this is the only Run.
func (p *Publisher) join(ctx context.Context) *connection {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.runs++
	if p.runs > 1 {
		return p.current
	}
	before := p.current
	ctx, stop := context.WithCancel(ctx)
	c := &connection{stop: stop, ended: make(chan struct{})}
	p.current = c
	go func() {
		defer close(c.ended)
		if before != nil {
			<-before.ended
		}
		p.out.Run(ctx)
	}()
	return c
}

// leave reports whether the Run that ends is the last one.
func (p *Publisher) leave() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.runs--
	return p.runs == 0
}

// Ready returns nil while a connection is open and the broker has not blocked it.
func (p *Publisher) Ready(context.Context) error {
	if err := p.out.Ready(); err != nil {
		return fmt.Errorf("outboxamqp: %w", err)
	}
	return nil
}

// OnReady has f called each time a connection is open, or the broker no longer blocks it:
// driver.Reconnecting.
func (p *Publisher) OnReady(f func()) (stop func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listeners[&f] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.listeners, &f)
	}
}

func (p *Publisher) up() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.listeners {
		(*f)()
	}
}

// Window returns how many messages await their confirm, and how many may: driver.Windowed. At the
// end of a connection all count as answered.
func (p *Publisher) Window() (used, size int) { return p.out.Window() }

// Publish implements driver.Publisher. Its failures are of class Permanent for a
// message that cannot be sent at all, Unroutable when no queue or no exchange takes
// it or this user may not publish there, Retryable when the broker refused it,
// Blocked during a resource alarm, and else Unavailable. Without a connection it fails at once, except that the first
// attempt of Run to connect is waited for, up to CallTimeout.
func (p *Publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	out, err := p.encode(m)
	if err != nil {
		done(err)
		return
	}
	p.out.Publish(ctx, out, func(err error) { done(classify(err)) })
}

func classify(err error) error {
	if err == nil {
		return nil
	}
	class := driver.Unavailable
	switch {
	case errors.Is(err, amqpconn.ErrInvalid):
		class = driver.Permanent
	case errors.Is(err, amqpconn.ErrUnroutable):
		class = driver.Unroutable
	case errors.Is(err, amqpconn.ErrNacked):
		class = driver.Retryable
	case errors.Is(err, amqpconn.ErrBlocked):
		class = driver.Blocked
	}
	return &driver.PublishError{Class: class, Err: err}
}

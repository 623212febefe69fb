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
	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

const scope = "github.com/holdfast-go/holdfast/outbox/outboxamqp"

// channels is the number of channels of a connection. The broker serves each channel with its own process. On a
// quorum queue four channels are a quarter faster than one, and as fast as several connections.
const channels = 4

// window is the number of messages that may await their confirms: two batches of a relay. A window that is always
// full is a twelfth faster on a quorum queue.
const window = 1000

// maxBody is the largest body that is sent. It is RabbitMQ's own limit since 4.0. A larger message would cost the
// channel and everything in flight on it.
const maxBody = 16 << 20

// Config configures a Publisher. The zero value works: it publishes to the default exchange, where
// the routing key names the queue.
type Config struct {
	// Exchange receives messages for which Routes, Router and the message itself name no exchange. Default: the
	// broker's default exchange.
	Exchange string
	// Routes maps message names to exchange, routing key and further headers. Router decides fields that are empty
	// in a route. Optional.
	Routes map[string]outbox.Route
	// Router returns the route of a message and replaces Message.Route, which it can read. If its exchange is
	// empty, Config.Exchange is used. If its routing key is empty, the message name is used. Several goroutines
	// call it at once. Default: Message.Route.
	Router func(outbox.Message) outbox.Route
	// Format is the form of messages: format.Symfony adds the headers for Symfony Messenger, format.CloudEvents
	// makes CloudEvents. Default: this module's own form.
	Format format.Format
	// Timeout bounds the dial, every call to the broker, and the wait for open confirms when Run ends. A message
	// waits one and a half Timeout for its confirm; then the connection is replaced. Default: 10 s.
	Timeout time.Duration
	// Logger receives lost connections. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider counts lost connections. Default: the global one.
	MeterProvider metric.MeterProvider
}

func (c Config) withDefaults() Config {
	c.Timeout = cmp.Or(c.Timeout, 10*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// confirmTimeout is longer than Timeout, because a late confirm costs the connection and everything in flight on
// it.
func (c Config) confirmTimeout() time.Duration { return c.Timeout + c.Timeout/2 }

// rules returns the rules that choose the route of a message.
func (c Config) rules() stored.Rules {
	return stored.Rules{ByName: c.Routes, Router: c.Router, Exchange: c.Exchange}
}

// Dial returns a function for NewPublisher that opens connections to the broker at url (amqp:// or amqps://), like
// amqp.DialConfig with cfg. The zero cfg works. The connections combine the small writes of many messages into few
// system calls; connections dialled in another way do not.
//
// If cfg.Dial is nil, the context bounds connecting, and its deadline bounds the handshakes. The function may be
// called from any goroutine. Its first call reports a bad url.
func Dial(url string, cfg amqp.Config) func(ctx context.Context) (*amqp.Connection, error) {
	return amqpconn.DialURL(url, cfg)
}

// Publisher is a driver.Publisher. Its methods may be called from any goroutine.
type Publisher struct {
	cfg   Config
	rules stored.Rules
	form  wire.Form
	dial  amqpconn.Dial
	out   *amqpconn.Publisher

	mu        sync.Mutex
	runs      int         // calls of Run
	current   *connection // of these runs
	listeners map[*func()]bool
}

// NewPublisher returns a publisher that connects with dial when Run is called. Every call of dial must open a new
// connection, without the client's own recovery.
func NewPublisher(dial func(ctx context.Context) (*amqp.Connection, error), cfg Config) (*Publisher, error) {
	return newPublisher(dial, cfg, window)
}

func newPublisher(dial amqpconn.Dial, cfg Config, window int) (*Publisher, error) {
	cfg = cfg.withDefaults()
	var errs []error
	if dial == nil {
		errs = append(errs, errors.New("outboxamqp: dial is nil"))
	}
	if cfg.Timeout < 0 {
		errs = append(errs, fmt.Errorf("outboxamqp: Config.Timeout is %v, want more than 0", cfg.Timeout))
	}
	form, err := wire.NewForm(cfg.Format)
	if err != nil {
		errs = append(errs, fmt.Errorf("outboxamqp: Config.Format: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	kit := telemetry.New(scope, nil, cfg.MeterProvider)
	lost, err := kit.Meter.Int64Counter("holdfast.outbox.amqp.lost_sessions",
		metric.WithDescription("Connections to RabbitMQ that failed or could not be opened"))
	if err != nil {
		return nil, fmt.Errorf("outboxamqp: %w", err)
	}
	p := &Publisher{cfg: cfg, rules: cfg.rules(), form: form, dial: dial, listeners: map[*func()]bool{}}
	p.out = amqpconn.NewPublisher(amqpconn.PublisherConfig{
		Dial: dial, Timeout: cfg.Timeout, Logger: cfg.Logger.With(slog.String("component", "outboxamqp")),
		Window: window, Channels: channels, ConfirmTimeout: cfg.confirmTimeout(), ShutdownTimeout: cfg.Timeout,
		Down: func(error) { lost.Add(context.Background(), 1) },
		Up:   p.up,
	})
	return p, nil
}

// connection lasts from the first call of Run to the end of the last.
type connection struct {
	stop  context.CancelFunc
	ended chan struct{}
}

// Run implements driver.Service; a relay calls it. It keeps a connection open until ctx ends. If several Runs
// overlap, the last to end rejects further messages as unavailable, and waits up to Config.Timeout for open
// confirms. Run returns nil. If the broker is down, at the start or later, Run keeps trying.
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

// join opens the connection if this is the only Run.
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

// leave reports whether the ending Run is the last one.
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

// OnReady registers f to be called each time a connection opens or the broker unblocks it. It implements
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

// Window returns the number of messages that await their confirms, and the maximum. After a connection ends, none
// await a confirm. It implements driver.Windowed.
func (p *Publisher) Window() (used, size int) { return p.out.Window() }

// System implements driver.Identified.
func (*Publisher) System() string { return "rabbitmq" }

// Publish implements driver.Publisher. The class of a failure is Permanent for a message that cannot be sent at
// all; Unroutable if no queue or exchange accepts it or the user may not publish there; Retryable if the broker
// refused it; Blocked during a resource alarm; otherwise Unavailable. Without a connection it fails at once, but
// it waits up to Config.Timeout for the first connection attempt of Run.
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

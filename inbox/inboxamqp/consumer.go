package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// The reasons why a consumer is not ready.
var (
	errNotRunning = errors.New("inboxamqp: not running")
	errPaused     = errors.New("inboxamqp: paused")
	errNoSession  = errors.New("inboxamqp: no session with RabbitMQ")
	errDraining   = errors.New("inboxamqp: draining")
)

// Consumer hands the messages of one queue to a Processor and settles them by its
// answers. Its methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	dial      amqpconn.Dial
	processor inbox.Processor
	signals   *signals

	running  atomic.Bool
	notReady atomic.Pointer[error] // nil while consuming
	copies   atomic.Pointer[amqpconn.Publisher]
	refusals refusals
	stuck    atomic.Int64 // handlers that ignore the end of their time
}

// NewConsumer returns a consumer of a queue that connects by dial once Run is called, over two
// connections: one receives, one publishes copies. Every call of dial must open a new
// connection, without the client's own recovery; Dial returns such a function.
//
// A processor with deduplication, such as *inboxpgx.Store, brings its ledger and its retention
// along, and Run prunes it. With a bare inbox.NewMux() a Consumer that never runs serves
// operators: Setup, Check and DeadLetters. Its Replay then takes for granted that processed
// messages are remembered for 8 days.
//
// The error names every violation in cfg. Nothing is asked of a server yet.
func NewConsumer(dial func(ctx context.Context) (*amqp.Connection, error), queue string, processor inbox.Processor, cfg Config) (*Consumer, error) {
	s := newSettings(queue, processor, cfg)
	err := s.validate()
	if processor == nil {
		err = errors.Join(errors.New("inboxamqp: processor is nil"), err)
	}
	if dial == nil {
		err = errors.Join(errors.New("inboxamqp: dial is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	signals, err := newSignals(&s)
	if err != nil {
		return nil, fmt.Errorf("inboxamqp: %w", err)
	}
	c := &Consumer{cfg: &s, dial: dial, processor: processor, signals: signals}
	c.setReady(errNotRunning)
	return c, nil
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. The broker may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return errors.New("inboxamqp: Run is running already")
	}
	defer c.running.Store(false)
	defer c.setReady(errNotRunning)
	c.setReady(errNoSession)

	r := c.newRun(ctx)
	r.serve(func() {
		amqpconn.Loop(r.life.stop, amqpconn.LoopConfig{
			Dial: c.dial, Timeout: c.cfg.Timeout, Logger: c.cfg.Logger,
			Down: func(err error) {
				c.signals.lost(ctx)
				c.setReady(fmt.Errorf("%w: %w", errNoSession, err))
			},
		}, r.session)
	})
	return nil
}

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so: why there is no session, which queue has refused a
// failed message within about a minute, or how many handlers overrun their time.
func (c *Consumer) Ready(context.Context) error {
	if err := c.notReady.Load(); err != nil {
		return *err
	}
	if n := c.stuck.Load(); n > 0 {
		return fmt.Errorf("inboxamqp: %d handlers do not return although their time is over", n)
	}
	if err := c.copies.Load().Ready(); err != nil {
		return fmt.Errorf("inboxamqp: publishing copies: %w", err)
	}
	return c.refusals.err(time.Now())
}

func (c *Consumer) setReady(err error) {
	if err == nil {
		c.notReady.Store(nil)
		return
	}
	c.notReady.Store(&err)
}

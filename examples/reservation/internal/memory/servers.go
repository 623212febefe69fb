package memory

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	idempotencydriver "github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry"
)

// Wire is between the shop and the servers that the fakes replace. All calls to servers pass it, except for calls
// inside a transaction, and for the steps of a consumer, which pass NewConsumer's fault.
type Wire interface {
	// Call makes a step on a server by calling do, and returns do's error or another one. It may call do once, never, or,
	// if a step may be repeated, such as StepPublish, twice. It is called from many goroutines.
	Call(ctx context.Context, server, step string, do func() error) error
	// Lease returns how long a lease of d, by the caller's clock, lasts by the server's clock.
	Lease(ctx context.Context, d time.Duration) time.Duration
}

// The servers.
const (
	PostgresServer = "postgres"
	RedisServer    = "redis"
	RabbitMQServer = "rabbitmq"
)

// The steps. A transaction is one call. Each of its attempts makes one call at its begin and one before its COMMIT;
// their errors fail the attempt.
const (
	StepTransaction = "transaction"
	StepBegin       = "begin"
	StepEnd         = "end"
	StepClaim       = "claim"
	StepRenew       = "renew"
	StepSettle      = "settle"
	StepKey         = "key"
	StepKeyExtend   = "key extend"
	StepKeyComplete = "key complete"
	StepKeyRelease  = "key release"
	StepLimit       = "limit"
	StepRefund      = "refund"
	StepPublish     = "publish"
)

// Server is a server that the fakes replace. Switched off, it is unreachable. Its methods may be called from any
// goroutine.
type Server struct {
	name string
	off  atomic.Bool
}

// Name returns the name of the server.
func (s *Server) Name() string { return s.name }

// Switch switches the server on or off.
func (s *Server) Switch(on bool) { s.off.Store(!on) }

// Off reports whether the server is switched off.
func (s *Server) Off() bool { return s.off.Load() }

// Ready returns nil while the server is on.
func (s *Server) Ready(context.Context) error {
	if s.Off() {
		return fmt.Errorf("memory: %s is switched off", s.name)
	}
	return nil
}

// Call implements Wire. A server that is switched off is unreachable; a transaction fails at its begin.
func (d *Demo) Call(ctx context.Context, server, step string, do func() error) error {
	for _, s := range d.Servers() {
		if s.name == server && step != StepTransaction && s.Off() {
			return s.Ready(ctx)
		}
	}
	return do()
}

// Lease implements Wire: all clocks are the same.
func (d *Demo) Lease(_ context.Context, lease time.Duration) time.Duration { return lease }

// transactor makes transactions pass the wire.
type transactor struct {
	txretry.Transactor
	wire Wire
}

// Do implements txretry.Transactor.
func (t transactor) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith implements txretry.Transactor.
func (t transactor) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.wire.Call(ctx, PostgresServer, StepTransaction, func() error {
		return t.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
			if err := t.within(ctx, StepBegin); err != nil {
				return err
			}
			if err := fn(ctx, tx); err != nil {
				return err
			}
			return t.within(ctx, StepEnd)
		})
	})
}

// within makes a step inside of a transaction. An unreachable server fails it like a server that shuts down.
func (t transactor) within(ctx context.Context, step string) error {
	err := t.wire.Call(ctx, PostgresServer, step, func() error { return nil })
	if _, said := errors.AsType[*pgconn.PgError](err); err == nil || said {
		return err
	}
	return &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: err.Error()}
}

// source is the relay's outbox, a table in Postgres.
type source struct {
	*outboxtest.Store
	wire Wire
}

// Claim implements driver.Source.
func (s source) Claim(ctx context.Context, req driver.Claim) (b driver.Batch, err error) {
	req.Lease = s.wire.Lease(ctx, req.Lease)
	err = s.wire.Call(ctx, PostgresServer, StepClaim, func() (err error) {
		b, err = s.Store.Claim(ctx, req)
		return err
	})
	if err != nil {
		return driver.Batch{}, err
	}
	return b, nil
}

// Renew implements driver.Source.
func (s source) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	ttl = s.wire.Lease(ctx, ttl)
	err = s.wire.Call(ctx, PostgresServer, StepRenew, func() (err error) {
		stale, err = s.Store.Renew(ctx, leases, ttl)
		return err
	})
	return stale, err
}

// Settle implements driver.Source.
func (s source) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (settled driver.Settled, err error) {
	err = s.wire.Call(ctx, PostgresServer, StepSettle, func() (err error) {
		settled, err = s.Store.Settle(ctx, b, outcomes)
		return err
	})
	return settled, err
}

// Keys is the store of idempotency keys, which is Redis on real servers.
type Keys struct {
	*idempotencytest.Store
	wire Wire
}

func newKeys(wire Wire) *Keys {
	store := idempotencytest.NewStore()
	store.Lease = wire.Lease
	return &Keys{store, wire}
}

// Begin implements idempotencydriver.Store.
func (k *Keys) Begin(ctx context.Context, claim idempotencydriver.Claim) (result idempotencydriver.BeginResult, err error) {
	err = k.wire.Call(ctx, RedisServer, StepKey, func() (err error) {
		result, err = k.Store.Begin(ctx, claim)
		return err
	})
	if err != nil {
		return idempotencydriver.BeginResult{}, err
	}
	return result, nil
}

// Extend implements idempotencydriver.Store.
func (k *Keys) Extend(ctx context.Context, claim idempotencydriver.Claim) error {
	return k.wire.Call(ctx, RedisServer, StepKeyExtend, func() error { return k.Store.Extend(ctx, claim) })
}

// Complete implements idempotencydriver.Store.
func (k *Keys) Complete(ctx context.Context, claim idempotencydriver.Claim, resp idempotencydriver.Response) error {
	return k.wire.Call(ctx, RedisServer, StepKeyComplete, func() error { return k.Store.Complete(ctx, claim, resp) })
}

// Release implements idempotencydriver.Store.
func (k *Keys) Release(ctx context.Context, claim idempotencydriver.Claim) error {
	return k.wire.Call(ctx, RedisServer, StepKeyRelease, func() error { return k.Store.Release(ctx, claim) })
}

// Limiter counts for the rate limits, on real servers in Redis.
type Limiter struct {
	*ratelimit.Memory
	wire Wire
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	err = l.call(ctx, StepLimit, func() (err error) {
		d, err = l.Memory.Allow(ctx, charges...)
		return err
	})
	return d, err
}

// Peek returns the decision of Allow, but charges nothing.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	err = l.call(ctx, StepLimit, func() (err error) {
		d, err = l.Memory.Peek(ctx, charges...)
		return err
	})
	return d, err
}

// Refund implements ratelimit.Limiter.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	return l.call(ctx, StepRefund, func() error { return l.Memory.Refund(ctx, charges...) })
}

// Reset resets the charges.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	return l.call(ctx, StepRefund, func() error { return l.Memory.Reset(ctx, charges...) })
}

// call converts the errors of the wire to errors of an unavailable limiter.
func (l *Limiter) call(ctx context.Context, step string, do func() error) error {
	var said error
	err := l.wire.Call(ctx, RedisServer, step, func() error {
		said = do()
		return said
	})
	if err == nil || errors.Is(err, said) {
		return err
	}
	return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, err)
}

// publisher is the relay's broker.
type publisher struct {
	*inboxtest.Broker
	cfg Config
}

// Publish implements driver.Publisher. Messages are published at the same time.
func (p publisher) Publish(ctx context.Context, m driver.Message, done func(error)) {
	go func() {
		err := p.cfg.Wire.Call(ctx, RabbitMQServer, StepPublish, func() error { return p.publish(ctx, m) })
		if _, classed := errors.AsType[*driver.PublishError](err); err != nil && !classed {
			err = &driver.PublishError{Class: driver.Unavailable, Err: err}
		}
		done(err)
	}()
}

func (p publisher) publish(ctx context.Context, m driver.Message) (err error) {
	p.Broker.Publish(ctx, m, func(e error) { err = e }) // it confirms before it returns
	if err != nil {
		return err
	}
	p.cfg.Flow.Note(flow.Published, m.Name)
	if p.cfg.Observe.Published != nil {
		p.cfg.Observe.Published(m.ID)
	}
	return nil
}

// fault decides the steps of the consumer. While RabbitMQ is off, nothing happens, and the session is lost.
func (s *Server) fault(inboxtest.Step, *inbox.Message) inboxtest.Outcome {
	if s.Off() {
		return inboxtest.FailBefore
	}
	return inboxtest.OK
}

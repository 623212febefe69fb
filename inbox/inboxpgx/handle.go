package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
)

// HandlerConfig configures one handler. The zero value is usable.
type HandlerConfig struct {
	// Waiter blocks the worker before each message, ahead of the Prepare step and of the
	// transaction; nil means no wait. When it fails the message is postponed, uncounted.
	Waiter inbox.Waiter
	// Timeout bounds the work on one delivery: the Prepare step and the transaction with
	// its retries, not the Waiter. 0 means no bound but the context's.
	Timeout time.Duration
}

func (c HandlerConfig) validate() error {
	if c.Timeout < 0 {
		return fmt.Errorf("inboxpgx: HandlerConfig.Timeout %v is negative", c.Timeout)
	}
	return nil
}

// Handle registers fn for the messages of a name. The body is decoded by inbox.Decode; the
// same type may be registered under several names. fn must have no effects but through tx
// and txretry.AfterCommit, and must not change v: it may run more than once. It is an error
// when fn is nil, cfg is invalid, or the name is, or has a handler already.
func Handle[T any](p *Processor, name string, fn func(ctx context.Context, tx pgx.Tx, v T) error, cfg HandlerConfig) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	prepare := func(context.Context, T) (struct{}, error) { return struct{}{}, nil }
	return HandlePrepared(p, name, prepare, func(ctx context.Context, tx pgx.Tx, v T, _ struct{}) error {
		return fn(ctx, tx, v)
	}, cfg)
}

// HandlePrepared is Handle with a step before the transaction, while no connection is held:
// the place for slow calls to other systems. What prepare returns is given to fn; its
// errors are classed like those of fn. It runs once per delivery, also for a message that
// then turns out to be a duplicate, so it must bear repetition.
func HandlePrepared[T, P any](p *Processor, name string, prepare func(ctx context.Context, v T) (P, error),
	fn func(ctx context.Context, tx pgx.Tx, v T, prepared P) error, cfg HandlerConfig,
) error {
	if prepare == nil || fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	if err := cfg.validate(); err != nil {
		return err
	}
	return p.mux.Register(name, func(ctx context.Context, m *inbox.Message) error {
		v, err := inbox.Decode[T](m)
		if err != nil {
			return err
		}
		if cfg.Timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, cfg.Timeout, errTimeout)
			defer cancel()
		}
		prepared, err := prepare(ctx, v)
		if err != nil {
			return err
		}
		return p.once(ctx, m, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v, prepared) })
	}, inbox.Blocking(cfg.Waiter))
}

var errTimeout = errors.New("inboxpgx: handler's Timeout is over")

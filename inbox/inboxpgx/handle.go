package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

var errTimeout = errors.New("inboxpgx: handler's Timeout is over")

// withTimeout bounds a context; a timeout of 0 does not.
func withTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, timeout, errTimeout)
}

// Handle registers fn for the messages of a name. The body is decoded by driver.Decode; the
// same type may be registered under several names. fn must have no effects but through tx
// and txretry.AfterCommit, and must not change v: it may run more than once. It is an error
// when fn is nil, or the name is invalid or has a handler already. Config.ByName has its settings.
func Handle[T any](s *Store, name string, fn func(ctx context.Context, tx pgx.Tx, v T) error) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	return register(s, name, func(_ context.Context, _ *inbox.Message, v T) (work, error) {
		return work{one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v) }}, nil
	})
}

// HandlePrepared is Handle with a step before the transaction, while no connection is held:
// the place for slow calls to other systems. What prepare returns is given to fn; its
// errors are classed like those of fn. It runs once per delivery, also for a message that
// then turns out to be a duplicate, so it must bear repetition. In a batch the Prepare steps
// of its messages run at once.
func HandlePrepared[T, P any](s *Store, name string, prepare func(ctx context.Context, v T) (P, error),
	fn func(ctx context.Context, tx pgx.Tx, v T, prepared P) error,
) error {
	if prepare == nil || fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	return register(s, name, func(ctx context.Context, _ *inbox.Message, v T) (work, error) {
		prepared, err := prepare(ctx, v)
		if err != nil {
			return work{}, err
		}
		if ctx.Err() != nil { // else it would count as if there had been no connection
			return work{}, fmt.Errorf("inboxpgx: the Prepare step took all the time: %w", context.Cause(ctx))
		}
		return work{one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v, prepared) }}, nil
	})
}

// Item is one message for a batch handler.
type Item[T any] struct {
	Message *inbox.Message
	Value   T
}

// HandleBatch is Handle for a handler that takes several messages in one call, for example
// to write them with one statement: those of its name that follow one another in a batch and
// are no duplicates. Without batches it gets one. When it fails it is called for each half,
// down to single messages, each call in a savepoint, so its error becomes that of one
// message only. A Timeout is meant per message.
func HandleBatch[T any](s *Store, name string, fn func(ctx context.Context, tx pgx.Tx, items []Item[T]) error) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	timeout := s.cfg.ByName[name].Timeout
	many := &batchHandler{run: func(ctx context.Context, tx pgx.Tx, items []any) error {
		ctx, cancel := withTimeout(ctx, time.Duration(len(items))*timeout)
		defer cancel()
		typed := make([]Item[T], len(items))
		for i, item := range items {
			typed[i] = item.(Item[T])
		}
		return fn(ctx, tx, typed)
	}}
	return register(s, name, func(_ context.Context, m *inbox.Message, v T) (work, error) {
		item := Item[T]{m, v}
		return work{
			one:  func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, []Item[T]{item}) },
			many: many, item: item,
		}, nil
	})
}

// batchHandler is what the messages of one HandleBatch have in common.
type batchHandler struct {
	run func(ctx context.Context, tx pgx.Tx, items []any) error
}

// register adds a handler that begin turns into work for the transaction.
func register[T any](s *Store, name string, begin func(ctx context.Context, m *inbox.Message, v T) (work, error)) error {
	cfg := s.cfg.ByName[name]
	err := s.mux.Register(name, func(ctx context.Context, m *inbox.Message) error {
		v, err := driver.Decode[T](m)
		if err != nil {
			return err
		}
		bounded, cancel := withTimeout(ctx, cfg.Timeout)
		defer cancel()
		w, err := begin(bounded, m, v)
		if err != nil {
			return err
		}
		if own, ok := ctx.Value(placeKey{}).(*place); ok {
			w.timeout = cfg.Timeout
			if outcome, joined := own.join(ctx, m, w); joined {
				return outcome
			}
		}
		w.timeout = 0 // bounded has it
		return s.alone(bounded, m, w)
	}, inbox.Blocking(cfg.Waiter))
	if err == nil {
		s.handled[name] = true
	}
	return err
}

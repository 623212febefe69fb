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

// work is what a handler wants done about one message.
type work struct {
	wait    inbox.Middleware                           // for leave to start; nil: at once
	timeout time.Duration                              // 0 means none
	prepare func(ctx context.Context) error            // before the transaction; nil: nothing
	one     func(ctx context.Context, tx pgx.Tx) error // nil: nothing

	many *batchHandler // does the same for neighbours of its kind; nil for the other handlers
	item any           // this message, as many takes it
}

// Handle registers fn for the messages of a name. The body is decoded by driver.Decode; the
// same type may be registered under several names. fn must have no effects but through tx
// and txretry.AfterCommit, and must not change v: it may run more than once. It is an error
// when fn is nil, or the name is invalid or has a handler already. Config.ByName has its settings.
func Handle[T any](s *Store, name string, fn func(ctx context.Context, tx pgx.Tx, v T) error) error {
	if fn == nil {
		return fmt.Errorf("inboxpgx: handler of %q is nil", name)
	}
	return register(s, name, func(_ *inbox.Message, v T) *work {
		return &work{one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v) }}
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
	s.slow = true
	return register(s, name, func(_ *inbox.Message, v T) *work {
		var prepared P
		return &work{
			prepare: func(ctx context.Context) (err error) {
				prepared, err = prepare(ctx, v)
				return err
			},
			one: func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, v, prepared) },
		}
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
	many := &batchHandler{run: func(ctx context.Context, tx pgx.Tx, items []any) error {
		typed := make([]Item[T], len(items))
		for i, item := range items {
			typed[i] = item.(Item[T])
		}
		return fn(ctx, tx, typed)
	}}
	return register(s, name, func(m *inbox.Message, v T) *work {
		item := Item[T]{m, v}
		return &work{
			one:  func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, []Item[T]{item}) },
			many: many, item: item,
		}
	})
}

// batchHandler is what the messages of one HandleBatch have in common.
type batchHandler struct {
	run func(ctx context.Context, tx pgx.Tx, items []any) error
}

// register adds a handler that begin turns into work on a message.
func register[T any](s *Store, name string, begin func(m *inbox.Message, v T) *work) error {
	cfg := s.cfg.ByName[name]
	var wait inbox.Middleware
	if cfg.Waiter != nil {
		wait, s.slow = inbox.Blocking(cfg.Waiter), true
	}
	err := s.mux.Route(name, func(m *inbox.Message) (any, error) {
		v, err := driver.Decode[T](m)
		if err != nil {
			return nil, err
		}
		w := begin(m, v)
		w.wait, w.timeout = wait, cfg.Timeout
		return w, nil
	})
	if err == nil {
		s.handled[name] = true
	}
	return err
}

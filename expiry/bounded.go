package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// errTooSlow is inside the error of a batch that ran into BatchTimeout.
var errTooSlow = errors.New("expiry: batch ran into BatchTimeout")

// stuckAfter is how long after its deadline a call counts as stuck.
const stuckAfter = 5 * time.Second

// bounded gives a call of the store BatchTimeout, and reports one that ignores it.
// A panic is an error.
func (s *Sweeper) bounded(ctx context.Context, what string, call func(context.Context) error) (err error) {
	bounded, cancel := context.WithTimeoutCause(ctx, s.cfg.BatchTimeout, errTooSlow)
	defer cancel()
	stuck := time.AfterFunc(s.cfg.BatchTimeout+stuckAfter, func() {
		s.contact(ctx, fmt.Errorf("%s is stuck: it ignores its deadline", what))
		s.cfg.Logger.ErrorContext(ctx, "expiry: stuck, a call ignores its deadline",
			slog.String("sweeper", s.cfg.Name), slog.String("call", what), slog.Duration("deadline", s.cfg.BatchTimeout))
	})
	defer stuck.Stop()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expiry: panic in store: %v", p)
		}
	}()
	return call(bounded)
}

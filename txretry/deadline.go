package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// sleep returns ctx's error if it ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ended is the end of ctx as an error under which both ctx.Err() and the cause
// are found.
func ended(ctx context.Context) error { return withCause(ctx, ctx.Err()) }

// withCause joins the cause of ctx's end, if it has ended, to what came of it.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	switch {
	case cause == nil || errors.Is(err, cause):
		return err
	case errors.Is(cause, err):
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

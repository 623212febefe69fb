package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// ErrQuarantineFull stops a sweep that has met more bad rows than
// SweeperConfig.MaxQuarantine.
var ErrQuarantineFull = errors.New("expiry: too many rows fail")

// Report is what one sweep did. The counts are of committed batches only.
type Report struct {
	Batches  int           // committed
	Expired  int           // rows whose state was changed
	Poisoned int           // rows put in quarantine
	Lag      time.Duration // how long the longest overdue row had been due
	Duration time.Duration
}

// Sweep expires what is due now and returns when nothing is left that another
// sweeper or transaction does not hold. One sweep runs at a time: a second call
// waits for the first.
//
// A batch that fails through one of its rows is halved until the row is found;
// that row goes to quarantine and the others are expired. Any other failure
// stops the sweep: the report then counts what was done before. Cancelling ctx
// stops it after the batch in hand, which has ShutdownTimeout to finish.
func (s *Sweeper) Sweep(ctx context.Context) (Report, error) {
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	start := time.Now()
	ctx, span := s.telemetry.start(ctx, s.cfg.Name)
	report, err := s.drain(ctx)
	report.Duration = time.Since(start)
	s.contact(ctx, err)
	s.telemetry.end(ctx, span, s.cfg.Name, report, err)
	if s.cfg.Hooks.OnSweep != nil {
		s.cfg.Hooks.OnSweep(ctx, report, err)
	}
	return report, err
}

// errTooSlow is inside the error of a batch that ran into BatchTimeout.
var errTooSlow = errors.New("expiry: batch ran into BatchTimeout")

// drain runs batches until one is short. limit shrinks to find a poison row and
// grows back afterwards. A batch that takes too long makes those of the next
// sweep smaller; a sweep that goes through makes them larger again.
func (s *Sweeper) drain(ctx context.Context) (Report, error) {
	var r Report
	limit := s.size
	for {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		batch, err := s.batch(ctx, limit)
		var blamed *BatchError
		switch {
		case err == nil:
			r.Batches++
			r.Expired += batch.Expired
			r.Lag = max(r.Lag, batch.Lag)
			if batch.Claimed < limit || batch.Expired == 0 { // no progress: others are at these rows
				s.size = min(s.size*2, s.cfg.BatchSize)
				return r, nil
			}
			limit = min(limit*2, s.size)
		case errors.Is(err, errTooSlow):
			s.size = max(1, limit/2)
			return r, err
		case !errors.As(err, &blamed) || len(blamed.Rows) == 0:
			return r, err
		case len(blamed.Rows) > 1:
			limit = len(blamed.Rows) / 2
		default:
			if err := s.isolate(ctx, blamed); err != nil {
				return r, err
			}
			r.Poisoned++
			limit = 1
		}
	}
}

// isolate puts the only row of a failed batch in quarantine.
func (s *Sweeper) isolate(ctx context.Context, e *BatchError) error {
	id := e.Rows[0]
	if !s.quarantine.add(id, time.Now()) {
		return fmt.Errorf("%w: %d are in quarantine: %w", ErrQuarantineFull, s.cfg.MaxQuarantine, e.Err)
	}
	s.cfg.Logger.ErrorContext(ctx, "expiry: row fails, left alone for now",
		slog.String("sweeper", s.cfg.Name), slog.String("row", id), slog.Any("error", e.Err), slog.Duration("quarantine", s.cfg.Quarantine))
	if s.cfg.Hooks.OnPoison != nil {
		s.cfg.Hooks.OnPoison(ctx, id, e.Err)
	}
	return nil
}

// batch runs one batch on a context that outlives ctx's cancellation for a while.
func (s *Sweeper) batch(ctx context.Context, limit int) (b Batch, err error) {
	ctx, cancel := runloop.Detach(ctx, s.cfg.ShutdownTimeout)
	defer cancel()
	ctx, cancelTimeout := context.WithTimeoutCause(ctx, s.cfg.BatchTimeout, errTooSlow)
	defer cancelTimeout()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expiry: panic in store: %v", p)
		}
	}()
	skip, _ := s.quarantine.current(time.Now())
	b, err = s.store.SweepBatch(ctx, Request{Limit: limit, Skip: skip})
	if err != nil && errors.Is(context.Cause(ctx), errTooSlow) {
		err = fmt.Errorf("%w of %v with a limit of %d rows: %w", errTooSlow, s.cfg.BatchTimeout, limit, err)
	}
	return b, err
}

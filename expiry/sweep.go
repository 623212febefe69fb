package expiry

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
)

// Report is what one sweep did. The counts are of committed batches only.
type Report struct {
	Batches  int           // committed
	Claimed  int           // rows found due
	Expired  int           // rows whose state was changed
	Raced    int           // rows that another transaction settled or locked first
	Poisoned int           // rows put in quarantine
	Lag      time.Duration // how long the longest overdue row had been due
	Duration time.Duration // of the sweep
}

func (r *Report) add(b driver.Batch) {
	r.Batches++
	r.Claimed += b.Claimed
	r.Expired += b.Expired
	r.Raced += b.Claimed - b.Expired
	r.Lag = max(r.Lag, b.Lag)
}

// Sweep expires what is due now and returns when nothing is left that another
// sweeper or transaction does not hold. One sweep runs at a time: a second call
// waits for the first. Cancelling ctx stops it after the batch in hand, which has
// ShutdownTimeout to finish. The report counts what was done, also beside an error.
//
// Rows whose batch fails are set aside until the others are done; then their
// batch is halved until the row at fault is found. That row goes to quarantine, and
// the rest is expired. A batch that takes longer than BatchTimeout, or fails by
// what is rarely a row's fault, ends the sweep with an error once the other rows
// are done, and the next sweep goes on with the search. Any other failure stops the
// sweep.
//
// The first sweep asks whether the store is fit to be swept. If not, it changes
// nothing and returns what to mend, as Run does.
func (s *Sweeper) Sweep(ctx context.Context) (Report, error) {
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	start := time.Now()
	ctx, span := s.telemetry.start(ctx, s.cfg.Name)
	p := pass{s: s, left: &s.left}
	err := s.fit(ctx)
	if err == nil {
		err = p.sweep(ctx)
	}
	p.report.Duration = time.Since(start)
	s.contact(ctx, err)
	s.telemetry.end(ctx, span, s.cfg.Name, p.report, err)
	return p.report, err
}

// fit asks the store until it is fit to be swept.
func (s *Sweeper) fit(ctx context.Context) error {
	store, ok := s.store.(driver.Fit)
	if !ok || s.left.fit {
		return nil
	}
	err := s.bounded(ctx, "fit", store.Fit)
	s.left.fit = err == nil
	return err
}

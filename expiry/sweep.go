package expiry

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
)

// ErrQuarantineFull stops a sweep that has met more bad rows than
// SweeperConfig.MaxQuarantine.
var ErrQuarantineFull = errors.New("expiry: too many rows fail")

// Report is what one sweep did. The counts are of committed batches only.
type Report struct {
	Batches  int           // committed
	Claimed  int           // rows found due
	Expired  int           // rows whose state was changed
	Raced    int           // rows that another transaction settled or locked first
	Poisoned int           // rows put in quarantine
	Lag      time.Duration // how long the longest overdue row had been due
	Duration time.Duration
	More     bool // ended by MaxDuration or MaxBatches: more may be due
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
// waits for the first.
//
// Rows whose batch fails are set aside until the others are done; then their
// batch is halved until the row at fault is found. It goes to quarantine, and
// the rest is expired. A batch that takes longer than BatchTimeout, or fails by
// what is rarely a row's fault, ends the sweep with an error once the other rows
// are done, and the next sweep goes on to look for the row at fault. Any other failure stops the sweep: the report then
// counts what was done before. Cancelling ctx stops it after the batch in hand,
// which has ShutdownTimeout to finish.
//
// The first sweep asks the store's Check, if there is one, and changes nothing
// but returns *CheckError if it finds something.
func (s *Sweeper) Sweep(ctx context.Context) (Report, error) {
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	r := pass{Sweeper: s, start: time.Now()}
	ctx, span := s.telemetry.start(ctx, s.cfg.Name)
	err := r.sweep(ctx)
	r.report.Duration = time.Since(r.start)
	s.contact(ctx, err)
	s.telemetry.end(ctx, span, s.cfg.Name, r.report, err)
	if s.cfg.Hooks.OnSweep != nil {
		s.cfg.Hooks.OnSweep(ctx, r.report, err)
	}
	return r.report, err
}

package expiry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// pass is the work of one sweep, which holds the sweeper's slot.
type pass struct {
	*Sweeper
	start   time.Time
	batches int // begun
	report  Report
}

func (p *pass) sweep(ctx context.Context) error {
	if err := p.check(ctx); err != nil {
		return err
	}
	p.suspects.release(time.Now())
	for done := false; !done; {
		var err error
		done, err = p.drain(ctx)
		full := isUnsure(err) && p.suspects.waiting() >= p.cfg.MaxQuarantine
		if p.report.More || err != nil && !full {
			return err
		}
		if (done || full) && p.suspects.resting(time.Now()) {
			return err
		}
		if halveErr := p.halve(ctx); halveErr != nil || err != nil || p.report.More {
			return cmp.Or(halveErr, err)
		}
	}
	return nil
}

// drain runs batches until one is short, or until so many rows are set aside
// that they come first. It begins where the last sweep was stopped, so that bad
// rows at the head cannot keep it from the others, and then once more at the head.
// One batch that takes too long, or fails by what is rarely a row's fault, may
// be due to a row of it; a second one ends it.
func (p *pass) drain(ctx context.Context) (done bool, err error) {
	var unsure error
	for whole := p.cursor == (driver.Cursor{}); ; {
		if spent, err := p.spent(ctx, p.batches > 0); spent {
			return false, err
		}
		req := driver.Request{Limit: p.size, After: p.cursor, Skip: p.suspects.skip()}
		batch, err := p.batch(ctx, req)
		switch {
		case err == nil && batch.Claimed == req.Limit && batch.Expired > 0:
			p.cursor = batch.Last
			continue
		case err == nil && whole:
			p.cursor = driver.Cursor{}
			return true, unsure
		case err == nil:
			whole, p.cursor = true, driver.Cursor{}
			continue
		case unsure != nil && isUnsure(err):
			return false, err
		}
		if err := p.passBy(ctx, err); err != nil {
			return false, err
		}
		if isUnsure(err) {
			unsure = err
		}
		if p.suspects.waiting() >= p.cfg.MaxQuarantine {
			return false, unsure
		}
	}
}

// passBy has the drain go on without the rows of a failed batch. It returns the
// error if none of them is to blame.
func (p *pass) passBy(ctx context.Context, err error) error {
	blamed := blame(ctx, err)
	switch {
	case blamed == nil:
		return err
	case len(blamed.Rows) == 1 && !isUnsure(err):
		return p.isolate(ctx, blamed)
	}
	p.cursor = blamed.Last
	if blamed.Doubtful && !p.suspects.makeRoom(p.cfg.MaxQuarantine) {
		return err // an outage: enough of its rows are set aside
	}
	p.suspects.setAside(blamed.Rows)
	return nil
}

// isUnsure reports whether the failure of a batch may well be no row's fault.
func isUnsure(err error) bool {
	blamed, ok := errors.AsType[*driver.BatchError](err)
	return errors.Is(err, errTooSlow) || ok && blamed.Doubtful
}

// blame returns which rows may have made a batch fail; nil if none did, or if the
// sweep was told to end.
func blame(ctx context.Context, err error) *driver.BatchError {
	var blamed *driver.BatchError
	if ctx.Err() != nil || !errors.As(err, &blamed) || len(blamed.Rows) == 0 {
		return nil
	}
	return blamed
}

// anOutage is how many batches in a row may fail by what is rarely a row's fault
// before the search for the row is put off.
const anOutage = 3

// halve looks for the rows at fault among those set aside. A batch that takes
// too long ends it, so that rows which fall due meanwhile are not kept waiting.
// One batch fits into every budget, or drains that use it up would keep those
// rows waiting for ever.
func (p *pass) halve(ctx context.Context) error {
	doubtful := 0 // batches in a row
	for begun := false; ; begun = true {
		rows, bad := p.suspects.next(p.size)
		if len(rows) == 0 {
			p.doubts = 0
			return nil
		}
		if spent, err := p.spent(ctx, begun); spent {
			return err
		}
		works := p.works || bad
		_, err := p.batch(ctx, driver.Request{Limit: len(rows), Only: rows})
		if err == nil {
			p.suspects.take(len(rows))
			doubtful = 0
			continue
		}
		blamed := blame(ctx, err)
		if blamed == nil || len(blamed.Rows) == 1 && innocent(err, works) {
			p.suspects.take(len(rows))
			p.suspects.setAside(rows) // the others first, next time
			p.rest()
			return err
		}
		if err := p.divide(ctx, rows, blamed); err != nil {
			return err
		}
		if errors.Is(err, errTooSlow) {
			return err
		}
		if !blamed.Doubtful {
			continue
		}
		if doubtful++; doubtful == anOutage {
			p.rest()
			return err
		}
	}
}

// innocent reports whether an error says nothing against the one row of its batch:
// no row causes it, or everything may be too slow, for all that is known.
func innocent(err error, works bool) bool {
	if errors.Is(err, errTooSlow) {
		return !works
	}
	return isUnsure(err)
}

// rest leaves all that is set aside alone for a while, longer and longer as long
// as nothing expires: what was tried failed by what is no row's fault, or rarely.
// Other rows do not wait for it.
func (p *pass) rest() {
	if p.report.Expired > 0 {
		p.doubts = 0
	}
	p.suspects.rest(time.Now().Add(p.policy.Delay(p.doubts, p.cfg.Rand())))
	p.doubts++
}

// divide isolates the row at fault among those that were tried, or has them
// tried again in two halves. Those that the batch did not get are in other hands.
func (p *pass) divide(ctx context.Context, tried []string, blamed *driver.BatchError) error {
	if len(blamed.Rows) == 1 {
		if err := p.isolate(ctx, blamed); err != nil {
			return err
		}
		rest := slices.DeleteFunc(slices.Clone(tried), func(id string) bool { return id == blamed.Rows[0] })
		p.suspects.take(len(tried))
		p.suspects.setAside(rest)
		return nil
	}
	half := len(blamed.Rows) / 2
	p.suspects.take(len(tried))
	p.suspects.setAside(blamed.Rows[:half])
	p.suspects.setAside(blamed.Rows[half:])
	return nil
}

// isolate puts the one row that failed by itself in quarantine.
func (p *pass) isolate(ctx context.Context, e *driver.BatchError) error {
	if p.report.Poisoned >= p.cfg.MaxQuarantine {
		return fmt.Errorf("%w: %d in one sweep: %w", ErrQuarantineFull, p.report.Poisoned, e.Err)
	}
	id := e.Rows[0]
	p.suspects.isolate(id, time.Now())
	p.report.Poisoned++
	p.cfg.Logger.ErrorContext(ctx, "expiry: row fails, left alone for now",
		slog.String("sweeper", p.cfg.Name), slog.String("row", id), slog.Any("error", e.Err), slog.Duration("quarantine", p.cfg.Quarantine))
	if p.cfg.Hooks.OnPoison != nil {
		p.cfg.Hooks.OnPoison(ctx, id, e.Err)
	}
	return nil
}

// spent reports whether no further batch must be begun. The budget does not hold
// back a first one.
func (p *pass) spent(ctx context.Context, begun bool) (bool, error) {
	if err := ctx.Err(); err != nil {
		return true, err
	}
	p.report.More = begun && (p.cfg.MaxBatches > 0 && p.batches >= p.cfg.MaxBatches ||
		p.cfg.MaxDuration > 0 && time.Since(p.start) >= p.cfg.MaxDuration)
	return p.report.More, nil
}

// errTooSlow is inside the error of a batch that ran into BatchTimeout.
var errTooSlow = errors.New("expiry: batch ran into BatchTimeout")

// batch runs one batch on a context that outlives ctx's cancellation for a while,
// and sets the size of the next. It grows only where twice the rows leave half of
// BatchTimeout, and within a sweep, since the one after an outage is the longest.
func (p *pass) batch(ctx context.Context, req driver.Request) (b driver.Batch, err error) {
	p.batches++
	begun := time.Now()
	detached, cancel := runloop.Detach(ctx, p.cfg.ShutdownTimeout)
	defer cancel()
	err = p.bounded(detached, "batch", func(ctx context.Context) error {
		b, err = p.store.SweepBatch(ctx, req)
		if err != nil && errors.Is(context.Cause(ctx), errTooSlow) {
			err = fmt.Errorf("%w of %v, with a limit of %d rows: %w", errTooSlow, p.cfg.BatchTimeout, req.Limit, err)
		}
		return err
	})
	slow := errors.Is(err, errTooSlow)
	p.works = (p.works || b.Expired > 0) && !slow
	switch {
	case len(req.Only) > 0: // suspects say nothing about the others
	case slow:
		p.size = max(1, req.Limit/2)
	case err == nil && time.Since(begun) < p.cfg.BatchTimeout/4:
		p.size = min(2*p.size, p.cfg.BatchSize)
	}
	if err != nil {
		return driver.Batch{}, err
	}
	p.report.add(b)
	if p.cfg.Hooks.OnBatch != nil {
		p.cfg.Hooks.OnBatch(ctx, b, p.report)
	}
	return b, nil
}

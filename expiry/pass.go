package expiry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// pass is the work of one sweep, whose caller holds the sweeper's slot. It drains:
// it takes batch after batch of due rows and sets those of failed batches aside.
// Then it searches them for the rows at fault; see search.go.
type pass struct {
	s      *Sweeper
	left   *leftover
	report Report
}

func (p *pass) sweep(ctx context.Context) error {
	suspects := p.s.suspects
	suspects.release(time.Now())
	for done := false; !done; {
		var err error
		done, err = p.drain(ctx)
		full := isUnsure(err) && p.crowded()
		if err != nil && !full {
			return err
		}
		if (done || full) && suspects.resting(time.Now()) {
			return err
		}
		if searchErr := p.search(ctx); searchErr != nil || err != nil {
			return cmp.Or(searchErr, err)
		}
	}
	return nil
}

// crowded reports whether so many rows are set aside that the search for the ones at
// fault comes first.
func (p *pass) crowded() bool { return p.s.suspects.crowded() }

// drain runs batches until one is short, or until so many rows are set aside
// that they come first. It begins where the last sweep was stopped, so that bad
// rows at the head cannot keep it from the others, and then once more at the head.
// One batch that takes too long, or fails by what is rarely a row's fault, may
// be due to a row of it; a second one ends the drain.
func (p *pass) drain(ctx context.Context) (done bool, err error) {
	var unsure error
	for whole := p.left.cursor == (driver.Cursor{}); ; {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		req := driver.Request{Limit: p.left.size, After: p.left.cursor, Skip: p.s.suspects.skip()}
		batch, err := p.batch(ctx, req)
		switch {
		case err == nil && batch.Claimed == req.Limit && batch.Expired > 0:
			p.left.cursor = batch.Last
			continue
		case err == nil && whole:
			p.left.cursor = driver.Cursor{}
			return true, unsure
		case err == nil:
			whole, p.left.cursor = true, driver.Cursor{}
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
		if p.crowded() {
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
	p.left.cursor = blamed.Last
	if blamed.Doubtful && p.s.suspects.full() {
		return err // an outage: enough of its rows are set aside
	}
	p.s.suspects.setAside(blamed.Rows)
	return nil
}

// batch runs one batch on a context that outlives ctx's cancellation for a while,
// and sets the size of the next. It grows only where twice the rows leave half of
// BatchTimeout, and within a sweep, since the one after an outage is the longest.
func (p *pass) batch(ctx context.Context, req driver.Request) (b driver.Batch, err error) {
	begun := time.Now()
	detached, cancel := runloop.Detach(ctx, p.s.cfg.ShutdownTimeout)
	defer cancel()
	err = p.s.bounded(detached, "batch", func(ctx context.Context) error {
		b, err = p.s.store.SweepBatch(ctx, req)
		if err != nil && errors.Is(context.Cause(ctx), errTooSlow) {
			err = fmt.Errorf("%w of %v, with a limit of %d rows: %w", errTooSlow, p.s.cfg.BatchTimeout, req.Limit, err)
		}
		return err
	})
	slow := errors.Is(err, errTooSlow)
	p.left.works = (p.left.works || b.Expired > 0) && !slow
	switch {
	case len(req.Only) > 0: // suspects say nothing about the others
	case slow:
		p.left.size = max(1, req.Limit/2)
	case err == nil && time.Since(begun) < p.s.cfg.BatchTimeout/4:
		p.left.size = min(2*p.left.size, p.s.cfg.BatchSize)
	}
	if err != nil {
		return driver.Batch{}, err
	}
	p.report.add(b)
	return b, nil
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

package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
)

// anOutage is how many batches in a row may fail by what is rarely a row's fault
// before the search for the row is put off.
const anOutage = 3

// errQuarantineFull stops a sweep that has met more bad rows than
// tuning.maxQuarantine.
var errQuarantineFull = errors.New("expiry: too many rows fail")

// search looks for the rows at fault among those set aside, by halving the batches
// that fail. A batch that takes too long ends it, so that rows which fall due
// meanwhile do not wait.
func (p *pass) search(ctx context.Context) error {
	suspects := p.s.suspects
	doubtful := 0 // batches in a row
	for {
		rows, again := suspects.next(p.left.size)
		if len(rows) == 0 {
			p.left.doubts = 0
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		works := p.left.works || again
		_, err := p.batch(ctx, driver.Request{Limit: len(rows), Only: rows})
		if err == nil {
			suspects.clear(rows)
			doubtful = 0
			continue
		}
		blamed := blame(ctx, err)
		if blamed == nil || len(blamed.Rows) == 1 && innocent(err, works) {
			suspects.setAside(rows) // the others first, next time
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
// rows rarely cause it, or everything may be too slow, for all that is known.
func innocent(err error, works bool) bool {
	if errors.Is(err, errTooSlow) {
		return !works
	}
	return isUnsure(err)
}

// rest leaves all that is set aside alone for a while, longer and longer as long
// as nothing expires. Other rows do not wait for it.
func (p *pass) rest() {
	if p.report.Expired > 0 {
		p.left.doubts = 0
	}
	p.s.suspects.rest(time.Now().Add(p.s.backoff.Delay(p.left.doubts, p.s.cfg.Rand())))
	p.left.doubts++
}

// divide isolates the row at fault among those that were tried, or has them
// tried again in two halves. Rows that the batch did not get are in other hands.
func (p *pass) divide(ctx context.Context, tried []string, blamed *driver.BatchError) error {
	if len(blamed.Rows) > 1 {
		p.s.suspects.divide(tried, blamed.Rows)
		return nil
	}
	if err := p.isolate(ctx, blamed); err != nil {
		return err
	}
	rest := slices.DeleteFunc(slices.Clone(tried), func(id string) bool { return id == blamed.Rows[0] })
	p.s.suspects.setAside(rest)
	return nil
}

// isolate puts the one row that failed by itself in quarantine.
func (p *pass) isolate(ctx context.Context, e *driver.BatchError) error {
	if p.report.Poisoned >= p.s.tuning.maxQuarantine {
		return fmt.Errorf("%w: %d in one sweep: %w", errQuarantineFull, p.report.Poisoned, e.Err)
	}
	id := e.Rows[0]
	p.s.suspects.isolate(id, time.Now())
	p.report.Poisoned++
	p.s.cfg.Logger.ErrorContext(ctx, "expiry: row fails, left alone for now", slog.String("sweeper", p.s.cfg.Name),
		slog.String("row", id), slog.Any("error", e.Err), slog.Duration("quarantine", p.s.cfg.Quarantine))
	return nil
}

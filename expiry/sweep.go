package expiry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/isolate"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Report is the result of one sweep. The counts include only committed batches.
type Report struct {
	Batches  int           // committed batches
	Claimed  int           // rows found due
	Expired  int           // rows whose state was changed
	Raced    int           // rows that another transaction settled or locked first
	Poisoned int           // rows put in quarantine
	Lag      time.Duration // how long the longest overdue row had been due
	Duration time.Duration // duration of the sweep
}

// Row is one row that expires.
type Row struct {
	// ID is the primary key as text.
	ID string
	// Deadline is the time from which the row counts as expired.
	Deadline time.Time
	// Values has the further columns that the store was configured to read, as text in the database's form. A NULL
	// column is missing.
	Values map[string]string
}

// RowError is an error of a callback that names the row at fault. No search is needed then.
type RowError struct {
	// ID is the row's primary key as text.
	ID string
	// Err is the cause.
	Err error
}

// Error implements error.
func (e *RowError) Error() string { return fmt.Sprintf("expiry: row %s: %v", e.ID, e.Err) }

// Unwrap returns the cause.
func (e *RowError) Unwrap() error { return e.Err }

// EventID returns the id of the message that announces an expiry. It is a UUID of version 7 with the deadline as its
// time. It is the same for the same kind, row and deadline (to the microsecond), so a repeated batch cannot announce
// the same expiry with a second id. kind is usually the message name.
func EventID(kind, rowID string, deadline time.Time) uuid.UUID {
	return ids.Deterministic(deadline, kind, rowID)
}

func (r *Report) add(b driver.Batch) {
	r.Batches++
	r.Claimed += b.Claimed
	r.Expired += b.Expired
	r.Raced += b.Claimed - b.Expired
	r.Lag = max(r.Lag, b.Lag)
}

// Sweep expires all due rows and returns when only rows are left that another sweeper or transaction holds. Only one
// sweep runs at a time; a second call waits for the first. Cancelling ctx stops Sweep after the running batch, which
// has ShutdownTimeout to finish. The report counts the work done, even with an error.
//
// Rows whose batch fails are set aside until the others are done. Then their batch is halved until the row at fault
// is found. That row goes to quarantine, and the rest expires. A batch that exceeds BatchTimeout, or fails by
// something that is rarely a row's fault, ends the sweep with an error after the other rows are done; the next sweep
// continues the search. Any other failure stops the sweep.
//
// The first sweep checks whether the store is ready to be swept. If not, it changes nothing and returns the findings,
// like Run.
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

// fit checks the store before each sweep until the check passes once.
func (s *Sweeper) fit(ctx context.Context) error {
	store, ok := s.store.(driver.Fit)
	if !ok || s.left.fit {
		return nil
	}
	err := s.bounded(ctx, "fit", store.Fit)
	s.left.fit = err == nil
	return err
}

// pass is the work of one sweep. Its caller holds the sweeper's slot. It first drains: it takes batch after batch of
// due rows and sets the rows of failed batches aside. Then it searches them for the rows at fault; see search.
type pass struct {
	s      *Sweeper
	left   *leftover
	report Report
	early  []string // rows that left a full quarantine early: the next pass tries them again
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

// crowded reports whether so many rows are set aside that the search must come first.
func (p *pass) crowded() bool { return p.s.suspects.crowded() }

// drain runs batches until one is short, or until so many rows are set aside that the search must come first. It
// starts at the position where the last sweep stopped, so that bad rows at the head cannot block the others, and then
// once more at the head. One batch that takes too long, or fails by something that is rarely a row's fault, may still
// be caused by one of its rows. A second one ends the drain.
func (p *pass) drain(ctx context.Context) (done bool, err error) {
	var unsure error
	for whole := p.left.cursor == (driver.Cursor{}); ; {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		req := driver.Request{Limit: p.left.size, After: p.left.cursor, Skip: append(p.s.suspects.skip(), p.early...)}
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

// passBy lets the drain continue without the rows of a failed batch. It returns the error if no row is to blame.
func (p *pass) passBy(ctx context.Context, err error) error {
	blamed := blame(ctx, err)
	switch {
	case blamed == nil:
		return err
	case len(blamed.Rows) == 1 && !isUnsure(err):
		err := p.isolate(ctx, blamed)
		if err != nil {
			p.left.cursor = blamed.Last // the next sweep starts behind these rows
		}
		return err
	}
	p.left.cursor = blamed.Last
	if blamed.Doubtful && p.s.suspects.full() {
		return err // an outage: enough of its rows are set aside
	}
	p.s.suspects.setAside(blamed.Rows)
	return nil
}

// batch runs one batch on a context that outlives the cancellation of ctx for a while, and adjusts the size of the
// next batch. The size grows only if twice the rows would use at most half of BatchTimeout. It also grows within a
// sweep, because the sweep after an outage is the longest.
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
	case len(req.Only) > 0: // a batch of suspects does not show how fast the others are
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

// isUnsure reports whether the failure of a batch is probably not a row's fault.
func isUnsure(err error) bool {
	blamed, ok := errors.AsType[*driver.BatchError](err)
	return errors.Is(err, errTooSlow) || ok && blamed.Doubtful
}

// blame returns the rows that may have made a batch fail; nil if there are none, or if the sweep was cancelled.
func blame(ctx context.Context, err error) *driver.BatchError {
	var blamed *driver.BatchError
	if ctx.Err() != nil || !errors.As(err, &blamed) || len(blamed.Rows) == 0 {
		return nil
	}
	return blamed
}

// anOutage is the number of consecutive batches that may fail by something that is rarely a row's fault before the
// search is postponed.
const anOutage = 3

// errQuarantineFull stops a sweep that has found more bad rows than tuning.maxQuarantine.
var errQuarantineFull = errors.New("expiry: too many rows fail")

// search finds the rows at fault among those set aside, by halving the batches that fail. A batch that takes too
// long ends the search, so that rows that fall due in the meantime do not wait.
func (p *pass) search(ctx context.Context) error {
	suspects := p.s.suspects
	doubtful := 0 // consecutive doubtful batches
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
			suspects.setAside(rows) // behind the others for the next time
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

// innocent reports whether an error does not incriminate the only row of its batch: rows rarely cause it, or
// everything may be too slow.
func innocent(err error, works bool) bool {
	if errors.Is(err, errTooSlow) {
		return !works
	}
	return isUnsure(err)
}

// rest postpones all rows that are set aside, for longer and longer as long as nothing expires. Other rows do not
// wait.
func (p *pass) rest() {
	if p.report.Expired > 0 {
		p.left.doubts = 0
	}
	p.s.suspects.rest(time.Now().Add(p.s.backoff.Delay(p.left.doubts, p.s.cfg.Rand())))
	p.left.doubts++
}

// divide isolates the row at fault among the tried rows, or splits the rows for two tries. Rows that the batch did
// not claim are held by other transactions.
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

// isolate puts the row that failed alone in quarantine.
func (p *pass) isolate(ctx context.Context, e *driver.BatchError) error {
	if p.report.Poisoned >= p.s.tuning.maxQuarantine {
		return fmt.Errorf("%w: %d in one sweep: %w", errQuarantineFull, p.report.Poisoned, e.Err)
	}
	id := e.Rows[0]
	p.early = append(p.early, p.s.suspects.isolate(id, time.Now())...)
	p.report.Poisoned++
	p.s.cfg.Logger.ErrorContext(ctx, "expiry: row failed and was quarantined", slog.String("sweeper", p.s.cfg.Name),
		slog.String("row", id), slog.Any("error", e.Err), slog.Duration("quarantine", p.s.cfg.Quarantine))
	return nil
}

// suspects are the rows that a sweep skips: rows set aside because one of them made a batch fail, and failing rows,
// which are in quarantine.
type suspects struct {
	period time.Duration // length of the quarantine
	limit  int           // largest number of rows in quarantine

	mu    sync.Mutex
	aside *isolate.Search[string]
	again map[string]bool // rows set aside after their quarantine
	bad   []badRow        // ordered by the end of their quarantine
	until time.Time       // when to try the rows set aside again
}

type badRow struct {
	id    string
	until time.Time
}

// newSuspects returns an empty set. limit also bounds the rows set aside: beyond it, rows that wait alone are
// dropped. They differ from other due rows only in that their search is finished.
func newSuspects(period time.Duration, limit int) *suspects {
	aside := isolate.New[string](isolate.Halves)
	aside.Most = limit
	return &suspects{period: period, limit: limit, aside: aside, again: map[string]bool{}}
}

// skip returns the ids of all suspects.
func (s *suspects) skip() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := s.aside.Rest()
	for _, row := range s.bad {
		ids = append(ids, row.id)
	}
	return ids
}

// setAside puts rows behind the rows that already wait.
func (s *suspects) setAside(rows []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(rows)
	s.aside.Add(rows...)
}

// clear removes rows from the waiting ones.
func (s *suspects) clear(rows []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(rows)
}

func (s *suspects) forget(rows []string) {
	s.aside.Clear(rows...)
	for _, id := range rows {
		delete(s.again, id)
	}
}

// divide splits the blamed rows of a failed batch into halves that wait.
func (s *suspects) divide(tried, blamed []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(tried)
	s.aside.Failed(blamed...)
}

// crowded reports whether the maximum number of rows is set aside.
func (s *suspects) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.aside.Rest()) >= s.limit
}

// full reports whether the maximum is reached even without rows that wait alone.
func (s *suspects) full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aside.Full()
}

// next returns the rows to try next, at most n, and whether it is a single row that was in quarantine before. They
// stay set aside.
func (s *suspects) next(n int) (rows []string, again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows = s.aside.Next(n)
	return rows, len(rows) == 1 && s.again[rows[0]]
}

// rest postpones the rows set aside until that time.
func (s *suspects) rest(until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = until
}

func (s *suspects) resting(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.until.After(now)
}

// isolate puts a row in quarantine. If the quarantine is full, the row that has been there longest leaves it early, and
// is returned.
func (s *suspects) isolate(id string, now time.Time) (early []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget([]string{id})
	if len(s.bad) >= s.limit {
		early = []string{s.bad[0].id}
		s.bad = s.bad[1:]
	}
	s.bad = append(s.bad, badRow{id, now.Add(s.period)})
	return early
}

// release sets rows aside whose quarantine has ended, each alone: a row that is still bad then fails alone.
func (s *suspects) release(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.bad) > 0 && !s.bad[0].until.After(now) {
		s.aside.Add(s.bad[0].id)
		s.again[s.bad[0].id] = true
		s.bad = s.bad[1:]
	}
	maps.DeleteFunc(s.again, func(id string, _ bool) bool { return !s.aside.Has(id) })
}

// due returns the time from now until the next try of a suspect, and false if there are no suspects.
func (s *suspects) due(now time.Time) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.aside.Next(1) != nil:
		return max(0, s.until.Sub(now)), true
	case len(s.bad) > 0:
		return s.bad[0].until.Sub(now), true
	}
	return 0, false
}

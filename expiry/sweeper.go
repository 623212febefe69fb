package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
)

// ErrNotReady is returned by Ready while no sweep has gone through lately.
var ErrNotReady = errors.New("expiry: sweeper not ready")

// CheckError tells what the store's Check found. Run and Sweep return it before
// anything is changed.
type CheckError struct{ Findings []Finding }

// Error lists the findings, and how to mend them.
func (e *CheckError) Error() string {
	lines := make([]string, len(e.Findings))
	for i, f := range e.Findings {
		lines[i] = f.String()
	}
	return "expiry: the store is not fit to be swept: " + strings.Join(lines, "; ")
}

// Sweeper expires what is due in a driver.Store. Make it with NewSweeper. It is safe
// for concurrent use.
type Sweeper struct {
	store     driver.Store
	cfg       SweeperConfig
	policy    backoff.Policy
	telemetry telemetry
	suspects  *suspects

	// Only who holds slot, while a sweep runs, may touch what follows it.
	slot    chan struct{}
	checked bool
	size    int           // of a batch
	cursor  driver.Cursor // where a sweep was stopped
	doubts  int           // sweeps in a row that ended with a row alone that was not to blame
	works   bool          // rows have expired since a batch was too slow

	mu     sync.Mutex
	alarms map[*alarm]struct{} // one for each call of Run
	health error               // of the last contact with the store
	last   time.Time
}

// NewSweeper returns a Sweeper on store.
func NewSweeper(store driver.Store, cfg SweeperConfig) (*Sweeper, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if store == nil {
		err = errors.Join(errors.New("expiry: store is nil"), err)
	}
	if cfg.Schedule == nil {
		schedule, cronErr := Cron(DefaultSchedule)
		cfg.Schedule, err = schedule, errors.Join(err, cronErr)
	}
	if err != nil {
		return nil, err
	}
	tel, err := newTelemetry(cfg)
	if err != nil {
		return nil, err
	}
	return &Sweeper{
		store:     store,
		cfg:       cfg,
		policy:    backoff.Policy{Base: min(time.Second/2, cfg.MaxBackoff), Max: cfg.MaxBackoff, Jitter: 0.5},
		telemetry: tel,
		suspects:  newSuspects(cfg.Quarantine, cfg.MaxQuarantine),
		alarms:    map[*alarm]struct{}{},
		slot:      make(chan struct{}, 1),
		size:      cfg.BatchSize,
		health:    errors.New("no sweep yet"),
	}, nil
}

// Run sweeps at once, on the schedule, when the next row falls due and after
// Wake, until ctx is cancelled; the batch in hand then has ShutdownTimeout to
// finish. It returns nil then. A failing store is logged and tried again, with
// growing pauses. *CheckError is the only error: the store has to be mended
// first.
func (s *Sweeper) Run(ctx context.Context) error {
	w := waiter{Sweeper: s, alarm: newAlarm(), rest: s.cfg.MinPause}
	s.begin(w.alarm)
	defer s.end(w.alarm)
	failures := 0
	for {
		scheduled := s.cfg.Schedule.Next(time.Now())
		report, err := s.Sweep(ctx)
		if unfit, ok := errors.AsType[*CheckError](err); ok {
			return unfit
		}
		if err != nil && report.Batches > 0 {
			failures = 0 // the store works, and other rows are not to be kept waiting
		}
		if err == nil {
			err = w.await(ctx, scheduled, report)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			failures = 0
			continue
		}
		w.forget()
		if w.pauseAfter(ctx, err, failures) != nil {
			return nil
		}
		failures++
	}
}

// Wake says that a row was made or changed that now falls due at that time, the
// deadline as it is stored, or at an unknown one if at is zero. Call it after the
// commit. It never blocks, and costs nothing unless at comes before the Sweeper's
// next look anyway; it then looks again at once. An unknown time also ends the pause
// after a failed sweep, for whoever calls has found the store to work.
func (s *Sweeper) Wake(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a := range s.alarms {
		a.set(at)
	}
}

// Ready returns nil while Run is running and its last contact with the store
// went well, else an error that wraps ErrNotReady.
func (s *Sweeper) Ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.alarms) == 0 {
		return fmt.Errorf("%w: not running", ErrNotReady)
	}
	if s.health != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, s.health)
	}
	return nil
}

// check asks the store once whether it is fit to be swept.
func (s *Sweeper) check(ctx context.Context) error {
	store, ok := s.store.(interface {
		Check(ctx context.Context) ([]Finding, error)
	})
	if !ok || s.checked {
		return nil
	}
	var findings []Finding
	err := s.bounded(ctx, "check", func(ctx context.Context) (err error) {
		findings, err = store.Check(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if len(findings) > 0 {
		return &CheckError{findings}
	}
	s.checked = true
	return nil
}

// stuckAfter is how long after its deadline a call counts as stuck.
const stuckAfter = 5 * time.Second

// bounded gives a call of the store BatchTimeout, and reports one that does not
// end even so. A panic is an error.
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

// contact notes how the store answered. What a cancelled caller gets says
// nothing about the store.
func (s *Sweeper) contact(ctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = time.Now()
	if err == nil || ctx.Err() == nil {
		s.health = err
	}
}

func (s *Sweeper) lastContact() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *Sweeper) begin(a *alarm) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alarms[a] = struct{}{}
}

func (s *Sweeper) end(a *alarm) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.alarms, a)
}

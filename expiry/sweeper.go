package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	kit "github.com/holdfast-go/holdfast/internal/telemetry"
)

// Sweeper expires the due rows of a store. Make it with NewSweeper. It is safe for concurrent use.
type Sweeper struct {
	store     driver.Store
	cfg       SweeperConfig
	schedule  schedule
	tuning    tuning
	backoff   backoff.Policy
	telemetry telemetry
	suspects  *suspects

	// slot is held while a sweep runs. Only its holder uses left.
	slot chan struct{}
	left leftover

	mu     sync.Mutex
	alarms map[*alarm]struct{} // one for each call of Run
	health error               // result of the last contact with the store
	last   time.Time           // time of that contact
}

// leftover is the state that one sweep leaves for the next.
type leftover struct {
	fit    bool          // Fit has returned nil
	size   int           // size of the next batch
	cursor driver.Cursor // where the last sweep stopped
	doubts int           // consecutive sweeps that postponed the search
	works  bool          // rows have expired since the last batch that was too slow
}

// NewSweeper returns a Sweeper on a store, such as from expirypgx.New or expirytest.New. It does not contact the
// server.
func NewSweeper(store driver.Store, cfg SweeperConfig) (*Sweeper, error) {
	cfg = cfg.withDefaults()
	schedule, scheduleErr := parseSchedule(cfg.Schedule)
	err := errors.Join(scheduleErr, cfg.validate())
	if store == nil {
		err = errors.Join(errors.New("expiry: store is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	tel, err := newTelemetry(cfg)
	if err != nil {
		return nil, err
	}
	s := &Sweeper{
		store:     store,
		cfg:       cfg,
		schedule:  schedule,
		telemetry: tel,
		alarms:    map[*alarm]struct{}{},
		slot:      make(chan struct{}, 1),
		left:      leftover{size: cfg.BatchSize},
		health:    runloop.NotRunning("no sweep yet"),
	}
	s.tune(defaultTuning)
	return s, nil
}

func (s *Sweeper) tune(t tuning) {
	s.tuning = t
	s.backoff = backoff.Policy{Base: min(time.Second/2, t.maxBackoff), Max: t.maxBackoff, Jitter: 0.5}
	s.suspects = newSuspects(s.cfg.Quarantine, t.maxQuarantine)
}

// Run sweeps at once, on the schedule, when the next row falls due and when the store announces a row, until ctx is
// cancelled. The running batch then has ShutdownTimeout to finish, and Run returns nil. A failure of the store is
// logged, and Run retries with growing pauses.
//
// The only error is a store that needs a fix first, for example because a table or an index is missing. Nothing has
// been changed then. Each finding in the error has a method Fix() string.
func (s *Sweeper) Run(ctx context.Context) error {
	w := waiter{s: s, alarm: newAlarm(), rest: s.tuning.minPause}
	s.begin(w.alarm)
	defer s.end(w.alarm)
	defer s.background(ctx)()
	failures := 0
	for {
		scheduled := s.schedule.Next(time.Now())
		report, err := s.Sweep(ctx)
		if isFinding(err) {
			return err
		}
		if err != nil && report.Batches > 0 {
			failures = 0 // the store works, and other rows must not wait
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

// background starts the store's Background. The returned function ends it and waits for its end.
func (s *Sweeper) background(ctx context.Context) (stop func()) {
	store, ok := s.store.(driver.Background)
	if !ok {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		store.Background(ctx, s.wake)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// wake announces a row that falls due at that time, or at an unknown time if at is zero. It never blocks, and does
// nothing unless at is before the next query. Otherwise the sweeper queries at once. An unknown time also ends the
// pause after a failed sweep, because the sender may have reached the store.
func (s *Sweeper) wake(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a := range s.alarms {
		a.set(at)
	}
}

// Ready returns nil while Run is running and its last contact with the store succeeded. Otherwise the error has the
// reason.
func (s *Sweeper) Ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.alarms) == 0 {
		return runloop.NotRunning("expiry: sweeper not ready: not running")
	}
	if s.health != nil {
		return fmt.Errorf("expiry: sweeper not ready: %w", s.health)
	}
	return nil
}

// Check returns the problems that the store finds, or nil. Findings are joined; each has a method Fix() string with
// the fix. Any other error in it means that the store could not be read. Check changes nothing.
func (s *Sweeper) Check(ctx context.Context) error {
	if store, ok := s.store.(interface{ Check(context.Context) error }); ok {
		return store.Check(ctx)
	}
	if store, ok := s.store.(driver.Fit); ok {
		return store.Fit(ctx)
	}
	return nil
}

// isFinding reports whether err is a finding to fix, not a failure to read the store.
func isFinding(err error) bool {
	var finding interface {
		error
		Fix() string
	}
	return errors.As(err, &finding)
}

// contact records the result of a call of the store. The error of a cancelled caller does not count.
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

// errTooSlow is in the error of a batch that exceeded BatchTimeout.
var errTooSlow = errors.New("expiry: batch exceeded BatchTimeout")

// stuckAfter is the time after its deadline when a call counts as stuck.
const stuckAfter = 5 * time.Second

// bounded runs a call of the store with BatchTimeout, and reports a call that ignores the timeout. A panic is
// returned as an error.
func (s *Sweeper) bounded(ctx context.Context, what string, call func(context.Context) error) (err error) {
	bounded, cancel := context.WithTimeoutCause(ctx, s.cfg.BatchTimeout, errTooSlow)
	defer cancel()
	stuck := time.AfterFunc(s.cfg.BatchTimeout+stuckAfter, func() {
		s.contact(ctx, fmt.Errorf("%s is stuck: the call ignores its deadline", what))
		s.cfg.Logger.ErrorContext(ctx, "expiry: call ignored its deadline",
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

const scope = "github.com/holdfast-go/holdfast/expiry"

// telemetry has the tracer, for one span per sweep, and the instruments.
type telemetry struct {
	tracer                             trace.Tracer
	claimed, expired, raced, poisoned  metric.Int64Counter
	duration, lag                      metric.Float64Histogram
	overdue, undated                   metric.Int64Gauge
	overdueAge, clockSkew, nextLookout metric.Float64Gauge
}

func newTelemetry(cfg SweeperConfig) (telemetry, error) {
	k := kit.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	t := telemetry{tracer: k.Tracer}
	var errs [11]error
	rows := func(name, description string) (metric.Int64Counter, error) {
		return k.Meter.Int64Counter("holdfast.expiry."+name, metric.WithDescription(description), metric.WithUnit("{row}"))
	}
	t.claimed, errs[0] = rows("claimed", "Due rows that were locked for expiry.")
	t.expired, errs[1] = rows("expired", "Expired rows.")
	t.raced, errs[2] = rows("raced", "Due rows that another transaction settled or locked first.")
	t.poisoned, errs[3] = rows("poisoned", "Rows put in quarantine because they made their batch fail.")
	t.duration, errs[4] = k.Meter.Float64Histogram("holdfast.expiry.sweep.duration",
		metric.WithDescription("Duration of a sweep."), metric.WithUnit("s"), kit.Seconds)
	t.lag, errs[5] = k.Meter.Float64Histogram("holdfast.expiry.lag",
		metric.WithDescription("Age of the longest overdue row of a sweep."), metric.WithUnit("s"), kit.Seconds)
	t.overdue, errs[6] = k.Meter.Int64Gauge("holdfast.expiry.overdue",
		metric.WithDescription("Active rows past their deadline at the last query, up to 10,000."), metric.WithUnit("{row}"))
	t.overdueAge, errs[7] = k.Meter.Float64Gauge("holdfast.expiry.overdue.age",
		metric.WithDescription("Age of the longest overdue active row at the last query."), metric.WithUnit("s"))
	t.clockSkew, errs[8] = k.Meter.Float64Gauge("holdfast.expiry.clock.skew",
		metric.WithDescription("This host's clock minus the store's clock, which decides."), metric.WithUnit("s"))
	t.nextLookout, errs[9] = k.Meter.Float64Gauge("holdfast.expiry.next",
		metric.WithDescription("Unix time of the sweeper's next sweep or query."), metric.WithUnit("s"))
	t.undated, errs[10] = k.Meter.Int64Gauge("holdfast.expiry.undated",
		metric.WithDescription("Active rows without a deadline, which never expire, at the last query, up to 10,000."), metric.WithUnit("{row}"))
	return t, errors.Join(errs[:]...)
}

func (t telemetry) start(ctx context.Context, name string) (context.Context, trace.Span) {
	return t.tracer.Start(ctx, "expiry.sweep", trace.WithAttributes(attribute.String("holdfast.sweeper", name)))
}

func labels(name string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("holdfast.sweeper", name))
}

func (t telemetry) end(ctx context.Context, span trace.Span, name string, r Report, err error) {
	defer span.End()
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, "sweep stopped early")
	}
	span.SetAttributes(attribute.Int("holdfast.expired", r.Expired), attribute.Int("holdfast.poisoned", r.Poisoned))
	ctx = context.WithoutCancel(ctx)
	t.claimed.Add(ctx, int64(r.Claimed), labels(name))
	t.expired.Add(ctx, int64(r.Expired), labels(name))
	t.raced.Add(ctx, int64(r.Raced), labels(name))
	t.poisoned.Add(ctx, int64(r.Poisoned), labels(name))
	t.duration.Record(ctx, r.Duration.Seconds(), labels(name))
	if r.Expired > 0 {
		t.lag.Record(ctx, r.Lag.Seconds(), labels(name))
	}
}

func (t telemetry) look(ctx context.Context, name string, o driver.Outlook, skew time.Duration) {
	t.overdue.Record(ctx, int64(o.Overdue), labels(name))
	t.overdueAge.Record(ctx, o.Lag.Seconds(), labels(name))
	t.undated.Record(ctx, int64(o.Undated), labels(name))
	t.clockSkew.Record(ctx, skew.Seconds(), labels(name))
}

func (t telemetry) plan(ctx context.Context, name string, next time.Time) {
	t.nextLookout.Record(ctx, float64(next.UnixMilli())/1000, labels(name))
}

package expiry

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/expiry/driver"
	kit "github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/expiry"

// telemetry is one span per sweep, and the instruments.
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
	t.claimed, errs[0] = rows("claimed", "Rows that were found due.")
	t.expired, errs[1] = rows("expired", "Rows that were expired.")
	t.raced, errs[2] = rows("raced", "Rows that were found due, and settled or locked by another transaction first.")
	t.poisoned, errs[3] = rows("poisoned", "Rows put in quarantine because they made their batch fail.")
	t.duration, errs[4] = k.Meter.Float64Histogram("holdfast.expiry.sweep.duration",
		metric.WithDescription("Duration of a sweep."), metric.WithUnit("s"), kit.Seconds)
	t.lag, errs[5] = k.Meter.Float64Histogram("holdfast.expiry.lag",
		metric.WithDescription("How long the longest overdue row of a sweep had been due."), metric.WithUnit("s"), kit.Seconds)
	t.overdue, errs[6] = k.Meter.Int64Gauge("holdfast.expiry.overdue",
		metric.WithDescription("Active rows past their deadline at the last look, up to 10,000."), metric.WithUnit("{row}"))
	t.overdueAge, errs[7] = k.Meter.Float64Gauge("holdfast.expiry.overdue.age",
		metric.WithDescription("How long the longest overdue active row had been due at the last look."), metric.WithUnit("s"))
	t.clockSkew, errs[8] = k.Meter.Float64Gauge("holdfast.expiry.clock.skew",
		metric.WithDescription("This host's clock less the store's. Only the store's decides."), metric.WithUnit("s"))
	t.nextLookout, errs[9] = k.Meter.Float64Gauge("holdfast.expiry.next",
		metric.WithDescription("When the sweeper sweeps or looks next, as Unix time."), metric.WithUnit("s"))
	t.undated, errs[10] = k.Meter.Int64Gauge("holdfast.expiry.undated",
		metric.WithDescription("Active rows without a deadline at the last look, which never expire, up to 10,000."), metric.WithUnit("{row}"))
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

package expiry

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	kit "github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/expiry"

// telemetry is one span and four instruments per sweep.
type telemetry struct {
	tracer   trace.Tracer
	expired  metric.Int64Counter
	poisoned metric.Int64Counter
	duration metric.Float64Histogram
	lag      metric.Float64Histogram
}

func newTelemetry(cfg SweeperConfig) (telemetry, error) {
	k := kit.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	t := telemetry{tracer: k.Tracer}
	var errs [4]error
	t.expired, errs[0] = k.Meter.Int64Counter("holdfast.expiry.expired",
		metric.WithDescription("Rows that were expired."), metric.WithUnit("{row}"))
	t.poisoned, errs[1] = k.Meter.Int64Counter("holdfast.expiry.poisoned",
		metric.WithDescription("Rows put in quarantine because they made their batch fail."), metric.WithUnit("{row}"))
	t.duration, errs[2] = k.Meter.Float64Histogram("holdfast.expiry.sweep.duration",
		metric.WithDescription("Duration of a sweep."), metric.WithUnit("s"))
	t.lag, errs[3] = k.Meter.Float64Histogram("holdfast.expiry.lag",
		metric.WithDescription("How long the longest overdue row of a sweep had been due."), metric.WithUnit("s"))
	return t, errors.Join(errs[:]...)
}

func (t telemetry) start(ctx context.Context, name string) (context.Context, trace.Span) {
	return t.tracer.Start(ctx, "expiry.sweep", trace.WithAttributes(attribute.String("holdfast.sweeper", name)))
}

func (t telemetry) end(ctx context.Context, span trace.Span, name string, r Report, err error) {
	defer span.End()
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, "sweep stopped early")
	}
	span.SetAttributes(attribute.Int("holdfast.expired", r.Expired), attribute.Int("holdfast.poisoned", r.Poisoned))
	ctx = context.WithoutCancel(ctx)
	labels := metric.WithAttributes(attribute.String("holdfast.sweeper", name))
	t.expired.Add(ctx, int64(r.Expired), labels)
	t.poisoned.Add(ctx, int64(r.Poisoned), labels)
	t.duration.Record(ctx, r.Duration.Seconds(), labels)
	if r.Expired > 0 {
		t.lag.Record(ctx, r.Lag.Seconds(), labels)
	}
}

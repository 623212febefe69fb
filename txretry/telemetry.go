package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	base "github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/txretry"

// telemetry reports every call of Do as a span "txretry.Do" and in metrics by
// operation: "holdfast.txretry.duration" (s) and "holdfast.txretry.attempts" by
// outcome, "holdfast.txretry.phase.duration" (s) by phase, and
// "holdfast.txretry.failures", the attempts that failed for a transient reason,
// by phase and SQLSTATE.
type telemetry struct {
	kit      base.Kit
	duration metric.Float64Histogram
	attempts metric.Int64Counter
	phases   metric.Float64Histogram
	failures metric.Int64Counter
}

func newTelemetry(cfg Config) (t telemetry, err error) {
	kit := base.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	t.kit = kit
	if t.duration, err = kit.Meter.Float64Histogram("holdfast.txretry.duration",
		metric.WithUnit("s"), metric.WithDescription("Duration of transactions, retries and delays included.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.attempts, err = kit.Meter.Int64Counter("holdfast.txretry.attempts",
		metric.WithUnit("{attempt}"), metric.WithDescription("Attempts made by transactions that have ended.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.phases, err = kit.Meter.Float64Histogram("holdfast.txretry.phase.duration",
		metric.WithUnit("s"), metric.WithDescription("Time that transactions spent in each phase.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.failures, err = kit.Meter.Int64Counter("holdfast.txretry.failures",
		metric.WithUnit("{attempt}"), metric.WithDescription("Attempts that failed for a transient reason.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	return t, nil
}

// start begins a span; it is nil if nobody would see it.
func (t *telemetry) start(ctx context.Context, name string) (context.Context, trace.Span) {
	if t.kit.Silent() {
		return ctx, nil
	}
	ctx, span := t.kit.Tracer.Start(ctx, "txretry.Do")
	if name != "" && span.IsRecording() {
		span.SetAttributes(attribute.String("holdfast.operation", name))
	}
	return ctx, span
}

func (t *telemetry) end(ctx context.Context, span trace.Span, d *Done) {
	t.measure(ctx, d)
	if span == nil {
		return
	}
	if span.IsRecording() {
		span.SetAttributes(attribute.String("holdfast.outcome", string(d.Outcome)), attribute.Int("holdfast.attempts", d.Attempts))
		d.Phases.each(func(phase string, spent time.Duration) {
			span.SetAttributes(attribute.Float64("holdfast.phase."+phase, spent.Seconds()))
		})
		for _, a := range d.Failed {
			span.AddEvent("attempt failed", trace.WithAttributes(
				attribute.String("holdfast.sqlstate", a.SQLSTATE), attribute.String("holdfast.phase", string(a.Phase))))
		}
		if d.Outcome == Unknown || errors.Is(d.Err, errNoReturn) {
			span.SetStatus(codes.Error, d.Err.Error())
		} else if d.Err != nil {
			span.SetStatus(codes.Error, "rolled back")
		}
	}
	span.End()
}

func (t *telemetry) measure(ctx context.Context, d *Done) {
	operation := attribute.String("operation", d.Name)
	if t.duration.Enabled(ctx) || t.attempts.Enabled(ctx) {
		labels := metric.WithAttributeSet(attribute.NewSet(operation, attribute.String("outcome", string(d.Outcome))))
		t.duration.Record(ctx, d.Duration.Seconds(), labels)
		t.attempts.Add(ctx, int64(d.Attempts), labels)
	}
	if t.phases.Enabled(ctx) {
		d.Phases.each(func(phase string, spent time.Duration) {
			t.phases.Record(ctx, spent.Seconds(), metric.WithAttributes(operation, attribute.String("phase", phase)))
		})
	}
	if len(d.Failed) > 0 && t.failures.Enabled(ctx) {
		for _, a := range d.Failed {
			t.failures.Add(ctx, 1, metric.WithAttributes(operation,
				attribute.String("phase", string(a.Phase)), attribute.String("sqlstate", a.SQLSTATE)))
		}
	}
}

// each calls f for the phases that took time.
func (p *Phases) each(f func(phase string, spent time.Duration)) {
	for _, part := range [...]struct {
		name  string
		spent time.Duration
	}{
		{"queue", p.Queue},
		{"acquire", p.Acquire},
		{"begin", p.Begin},
		{"fn", p.Fn},
		{"commit", p.Commit},
		{"resolve", p.Resolve},
		{"sleep", p.Sleep},
	} {
		if part.spent > 0 {
			f(part.name, part.spent)
		}
	}
}

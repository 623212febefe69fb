package txretry

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	base "github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/txretry"

// telemetry reports every call of Do as a span "txretry.Do", a duration
// "holdfast.txretry.duration" (s) and a number of attempts
// "holdfast.txretry.attempts", by operation and outcome.
type telemetry struct {
	tracer   trace.Tracer
	duration metric.Float64Histogram
	attempts metric.Int64Counter
}

func newTelemetry(cfg Config) (telemetry, error) {
	kit := base.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	duration, err := kit.Meter.Float64Histogram("holdfast.txretry.duration",
		metric.WithUnit("s"), metric.WithDescription("Duration of transactions, retries and delays included."))
	if err != nil {
		return telemetry{}, fmt.Errorf("txretry: %w", err)
	}
	attempts, err := kit.Meter.Int64Counter("holdfast.txretry.attempts",
		metric.WithUnit("{attempt}"), metric.WithDescription("Attempts made by transactions that have ended."))
	if err != nil {
		return telemetry{}, fmt.Errorf("txretry: %w", err)
	}
	return telemetry{kit.Tracer, duration, attempts}, nil
}

func (t telemetry) start(ctx context.Context, name string) (context.Context, trace.Span) {
	ctx, span := t.tracer.Start(ctx, "txretry.Do")
	if name != "" && span.IsRecording() {
		span.SetAttributes(attribute.String("holdfast.operation", name))
	}
	return ctx, span
}

func (t telemetry) end(ctx context.Context, span trace.Span, d Done) {
	if t.duration.Enabled(ctx) || t.attempts.Enabled(ctx) {
		labels := metric.WithAttributeSet(attribute.NewSet(
			attribute.String("operation", d.Name), attribute.String("outcome", string(d.Outcome))))
		t.duration.Record(ctx, d.Duration.Seconds(), labels)
		t.attempts.Add(ctx, int64(d.Attempts), labels)
	}
	if span.IsRecording() {
		span.SetAttributes(attribute.String("holdfast.outcome", string(d.Outcome)), attribute.Int("holdfast.attempts", d.Attempts))
		if d.Outcome == Unknown || d.Err == errNoReturn {
			span.SetStatus(codes.Error, d.Err.Error())
		} else if d.Err != nil {
			span.SetStatus(codes.Error, "rolled back")
		}
	}
	span.End()
}

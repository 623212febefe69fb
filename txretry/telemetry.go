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
	"github.com/holdfast-go/holdfast/txretry/driver"
)

const scope = "github.com/holdfast-go/holdfast/txretry"

// telemetry reports every call of Do as a span "txretry.Do", with a child span for each attempt. It reports metrics
// by operation: "holdfast.txretry.duration" (s) and "holdfast.txretry.attempts" by outcome,
// "holdfast.txretry.phase.duration" (s) by phase, and "holdfast.txretry.failures", the attempts that failed for a
// transient reason, by phase and SQLSTATE. With a retry budget it also reports "holdfast.txretry.refused", the calls that
// were not started, which the other metrics leave out, and "holdfast.txretry.budget.exceeded", the number of Managers
// that now start a call only while no other runs.
type telemetry struct {
	kit      base.Kit
	duration metric.Float64Histogram
	attempts metric.Int64Counter
	phases   metric.Float64Histogram
	failures metric.Int64Counter
	refused  metric.Int64Counter
}

func newTelemetry(cfg Config) (t telemetry, err error) {
	kit := base.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	t.kit = kit
	if t.duration, err = kit.Meter.Float64Histogram("holdfast.txretry.duration",
		metric.WithUnit("s"), base.Seconds, metric.WithDescription("Duration of transactions, including retries and delays.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.attempts, err = kit.Meter.Int64Counter("holdfast.txretry.attempts",
		metric.WithUnit("{attempt}"), metric.WithDescription("Attempts of ended transactions.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.phases, err = kit.Meter.Float64Histogram("holdfast.txretry.phase.duration",
		metric.WithUnit("s"), base.Seconds, metric.WithDescription("Time in each phase of transactions.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.failures, err = kit.Meter.Int64Counter("holdfast.txretry.failures",
		metric.WithUnit("{attempt}"), metric.WithDescription("Attempts that failed for a transient reason.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	if t.refused, err = kit.Meter.Int64Counter("holdfast.txretry.refused",
		metric.WithUnit("{call}"), metric.WithDescription("Calls that the retry budget did not let start.")); err != nil {
		return t, fmt.Errorf("txretry: %w", err)
	}
	return t, nil
}

// observe reports a budget for as long as the meter provider lives. A Manager has no end either. An up-down counter adds
// the Managers of a process.
func (t *telemetry) observe(b *budget) error {
	if b == nil {
		return nil
	}
	exceeded, err := t.kit.Meter.Int64ObservableUpDownCounter("holdfast.txretry.budget.exceeded",
		metric.WithUnit("{manager}"), metric.WithDescription("Managers that start a call only while no other runs, because their retry budget is exceeded."))
	if err == nil {
		_, err = t.kit.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			n := int64(0)
			if b.exceeded() {
				n = 1
			}
			o.ObserveInt64(exceeded, n)
			return nil
		}, exceeded)
	}
	if err != nil {
		return fmt.Errorf("txretry: %w", err)
	}
	return nil
}

// start starts a span; it is nil if no exporter would receive it.
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

// startAttempt starts the span of an attempt if its call is recorded; otherwise it is nil.
func (t *telemetry) startAttempt(ctx context.Context, n int) (context.Context, trace.Span) {
	if t.kit.Silent() || !trace.SpanFromContext(ctx).IsRecording() {
		return ctx, nil
	}
	return t.kit.Tracer.Start(ctx, "txretry.attempt", trace.WithAttributes(attribute.Int("holdfast.attempt", n)))
}

// endAttempt ends the span of an attempt, also if its fn did not return.
func endAttempt(span trace.Span, returned bool, res *result) {
	if span == nil {
		return
	}
	switch {
	case !returned:
		span.SetStatus(codes.Error, errNoReturn.Error())
	case res.err != nil:
		span.SetAttributes(attribute.String("holdfast.phase", res.phase), attribute.String("holdfast.sqlstate", res.sqlstate))
		span.SetStatus(codes.Error, "not committed")
	}
	span.End()
}

// end reports a call that took this long and returned err.
func (t *telemetry) end(ctx context.Context, span trace.Span, c *call, took time.Duration, err error) {
	t.measure(ctx, c, took)
	if span == nil {
		return
	}
	if span.IsRecording() {
		describe(span, c, err)
	}
	span.End()
}

func describe(span trace.Span, c *call, err error) {
	span.SetAttributes(attribute.String("holdfast.outcome", c.outcome.String()), attribute.Int("holdfast.attempts", c.attempts))
	c.phases.each(func(phase string, spent time.Duration) {
		span.SetAttributes(attribute.Float64("holdfast.phase."+phase, spent.Seconds()))
	})
	for _, a := range c.failed {
		span.AddEvent("attempt failed", trace.WithAttributes(
			attribute.String("holdfast.sqlstate", a.SQLSTATE), attribute.String("holdfast.phase", a.Phase)))
	}
	if c.outcome == driver.Unknown || errors.Is(err, errNoReturn) {
		span.SetStatus(codes.Error, err.Error())
	} else if err != nil {
		span.SetStatus(codes.Error, "rolled back")
	}
}

func (t *telemetry) measure(ctx context.Context, c *call, took time.Duration) {
	operation := attribute.String("operation", c.opts.Name)
	if c.refused {
		t.refused.Add(ctx, 1, metric.WithAttributes(operation))
		return
	}
	if t.duration.Enabled(ctx) || t.attempts.Enabled(ctx) {
		labels := metric.WithAttributeSet(attribute.NewSet(operation, attribute.String("outcome", c.outcome.String())))
		t.duration.Record(ctx, took.Seconds(), labels)
		t.attempts.Add(ctx, int64(c.attempts), labels)
	}
	if t.phases.Enabled(ctx) {
		c.phases.each(func(phase string, spent time.Duration) {
			t.phases.Record(ctx, spent.Seconds(), metric.WithAttributes(operation, attribute.String("phase", phase)))
		})
	}
	if len(c.failed) > 0 && t.failures.Enabled(ctx) {
		for _, a := range c.failed {
			t.failures.Add(ctx, 1, metric.WithAttributes(operation,
				attribute.String("phase", a.Phase), attribute.String("sqlstate", a.SQLSTATE)))
		}
	}
}

// Package telemetry is the little that every package needs of OpenTelemetry:
// the global provider where none is given, and the trace context in headers.
package telemetry

import (
	"context"
	"maps"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Kit is the tracer and the meter of one package.
type Kit struct {
	Tracer trace.Tracer
	Meter  metric.Meter
}

// New returns the kit for the instrumentation scope, which is the import path
// of the package. A nil provider means the global one.
func New(scope string, tp trace.TracerProvider, mp metric.MeterProvider) Kit {
	if tp == nil {
		tp = otel.GetTracerProvider()
	}
	if mp == nil {
		mp = otel.GetMeterProvider()
	}
	return Kit{Tracer: tp.Tracer(scope), Meter: mp.Meter(scope)}
}

// Inject returns headers with the W3C trace context of ctx. The map that was
// given stays as it is; without a span it is returned itself.
func Inject(ctx context.Context, headers map[string]string) map[string]string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return headers
	}
	carrier := make(propagation.MapCarrier, len(headers)+2)
	maps.Copy(carrier, headers)
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier
}

// Extract returns the span context that Inject wrote, for a link to it. It is
// invalid where there is none. A message may come from anywhere, so it is
// never used as a parent.
func Extract(ctx context.Context, headers map[string]string) trace.SpanContext {
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier(headers))
	return trace.SpanContextFromContext(ctx)
}

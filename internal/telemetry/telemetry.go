// Package telemetry is the little that every package needs of OpenTelemetry:
// the global provider where none is given, and the trace context in headers.
package telemetry

import (
	"context"
	"fmt"
	"maps"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Seconds are the buckets of durations, from 1 ms to an hour. Those of OpenTelemetry are made for milliseconds.
var Seconds = metric.WithExplicitBucketBoundaries(
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

// Kit is the tracer and the meter of one package.
type Kit struct {
	Tracer trace.Tracer
	Meter  metric.Meter

	silent trace.TracerProvider // not nil: Tracer records nothing while this is the global one
}

// New returns the kit for the instrumentation scope, which is the import path
// of the package. A nil provider means the global one.
func New(scope string, tp trace.TracerProvider, mp metric.MeterProvider) Kit {
	if mp == nil {
		mp = otel.GetMeterProvider()
	}
	k := Kit{Meter: mp.Meter(scope)}
	if tp != nil {
		k.Tracer = tp.Tracer(scope)
		return k
	}
	global := otel.GetTracerProvider()
	k.Tracer = global.Tracer(scope)
	if isSilent(k.Tracer) {
		k.silent = global
	}
	return k
}

// isSilent reports whether no SDK stands behind a tracer (yet).
func isSilent(t trace.Tracer) bool {
	_, none := t.(noop.Tracer)
	return none || fmt.Sprintf("%T", t) == "*global.tracer"
}

// Silent reports whether nobody would see a span of the Tracer, which would only
// cost its allocation.
func (k Kit) Silent() bool { return k.silent != nil && k.silent == otel.GetTracerProvider() }

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

// Extract returns the span context that Inject wrote, for a link to it, and for a
// parent of what is done for this one message. It is invalid where there is none.
func Extract(ctx context.Context, headers map[string]string) trace.SpanContext {
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier(headers))
	return trace.SpanContextFromContext(ctx)
}

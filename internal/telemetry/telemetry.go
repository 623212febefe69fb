// Package telemetry has the OpenTelemetry helpers that all packages share: default providers, the trace context
// in headers, and limits for repeated log lines.
package telemetry

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Seconds are buckets for durations from 1 ms to an hour. The default buckets of OpenTelemetry are meant for
// milliseconds.
var Seconds = metric.WithExplicitBucketBoundaries(
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

// Kit is the tracer and the meter of one package.
type Kit struct {
	Tracer trace.Tracer
	Meter  metric.Meter

	silent trace.TracerProvider // not nil: Tracer records nothing while this is the global provider
}

// New returns the kit for an instrumentation scope, which is the import path of the package. A nil provider
// means the global provider.
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

// isSilent reports whether a tracer has no SDK behind it (yet).
func isSilent(t trace.Tracer) bool {
	_, none := t.(noop.Tracer)
	return none || fmt.Sprintf("%T", t) == "*global.tracer"
}

// Silent reports whether spans of the Tracer would not be recorded. Callers then save their allocation.
func (k Kit) Silent() bool { return k.silent != nil && k.silent == otel.GetTracerProvider() }

// Inject returns headers with the W3C trace context of ctx. It does not change the given map. Without a span it
// returns that map.
func Inject(ctx context.Context, headers map[string]string) map[string]string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return headers
	}
	carrier := make(propagation.MapCarrier, len(headers)+2)
	maps.Copy(carrier, headers)
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier
}

// Extract returns the span context that Inject wrote. Use it for links, and as the parent of work for this one
// message. It is invalid if the headers have none.
func Extract(ctx context.Context, headers map[string]string) trace.SpanContext {
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier(headers))
	return trace.SpanContextFromContext(ctx)
}

// quietFor is the time after a log line in which the same fault is not logged again.
const quietFor = 10 * time.Second

// Seldom limits the log lines of a repeating fault: one line now and then, with the number of skipped lines.
// The zero value is ready. It is safe for concurrent use.
type Seldom struct {
	mu      sync.Mutex
	last    time.Time
	skipped int
}

// Due reports whether to log now, and how many lines were skipped since the last one.
func (s *Seldom) Due() (skipped int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.last.IsZero() && time.Since(s.last) < quietFor {
		s.skipped++
		return 0, false
	}
	skipped, s.last, s.skipped = s.skipped, time.Now(), 0
	return skipped, true
}

// maxKinds bounds how many kinds of faults are distinguished.
const maxKinds = 1000

// SeldomEach is a Seldom for each kind of fault. The zero value is ready. It is safe for
// concurrent use.
type SeldomEach struct {
	mu    sync.Mutex
	kinds map[string]*Seldom
}

// Due calls Due of the kind's Seldom. After 1,000 kinds, further kinds share one.
func (s *SeldomEach) Due(kind string) (skipped int, ok bool) { return s.of(kind).Due() }

func (s *SeldomEach) of(kind string) *Seldom {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.kinds) >= maxKinds && s.kinds[kind] == nil {
		kind = ""
	}
	if s.kinds == nil {
		s.kinds = map[string]*Seldom{}
	}
	if s.kinds[kind] == nil {
		s.kinds[kind] = &Seldom{}
	}
	return s.kinds[kind]
}

// optIn is the variable that selects OpenTelemetry conventions which are in development.
const optIn = "OTEL_SEMCONV_STABILITY_OPT_IN"

// Operation returns the attributes of the messaging conventions for an operation on one message: create, send
// or process. The conventions are in development, so it returns nil unless the environment selects messaging.
func Operation(name string) []attribute.KeyValue {
	asked := strings.Split(os.Getenv(optIn), ",")
	if !slices.ContainsFunc(asked, func(s string) bool { return s == "messaging" || s == "messaging/dup" }) {
		return nil
	}
	return []attribute.KeyValue{
		attribute.String("messaging.operation.name", name),
		attribute.String("messaging.operation.type", name),
	}
}

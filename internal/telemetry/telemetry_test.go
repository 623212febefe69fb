package telemetry_test

import (
	"context"
	"os"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestTraceContextTravelsInHeaders(t *testing.T) {
	t.Parallel()
	sc := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled,
	})
	given := map[string]string{"tenant": "a"}
	headers := telemetry.Inject(trace.ContextWithSpanContext(t.Context(), sc), given)
	if len(given) != 1 || headers["tenant"] != "a" {
		t.Errorf("given = %v, result = %v", given, headers)
	}
	got := telemetry.Extract(context.Background(), headers)
	if got.TraceID() != sc.TraceID() || got.SpanID() != sc.SpanID() || !got.IsSampled() {
		t.Errorf("extracted %v, want %v", got, sc)
	}
}

func TestNoSpanNoHeader(t *testing.T) {
	t.Parallel()
	if got := telemetry.Inject(t.Context(), nil); got != nil {
		t.Errorf("Inject without a span = %v", got)
	}
	if sc := telemetry.Extract(t.Context(), map[string]string{"traceparent": "nonsense"}); sc.IsValid() {
		t.Errorf("Extract of nonsense = %v", sc)
	}
}

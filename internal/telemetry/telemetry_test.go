package telemetry_test

import (
	"context"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

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

func TestSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s telemetry.Seldom
		var lines []int
		for range 250 { // 25 seconds
			if skipped, ok := s.Due(); ok {
				lines = append(lines, skipped)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if want := []int{0, 99, 99}; !slices.Equal(lines, want) {
			t.Errorf("logged with %v left out, want %v", lines, want)
		}
	})
}

func TestSeldomEach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s telemetry.SeldomEach
		lines := map[string]int{}
		for n := range 3000 { // 15 seconds
			for _, kind := range []string{"steady", "kind " + strconv.Itoa(n)} {
				if _, ok := s.Due(kind); ok {
					lines[kind]++
				}
			}
			time.Sleep(5 * time.Millisecond)
		}
		if lines["steady"] != 2 {
			t.Errorf("%d lines of one kind, want 2", lines["steady"])
		}
		if n := len(lines); n < 1000 || n > 1010 {
			t.Errorf("lines of %d kinds, want a thousand and a few for all others", n)
		}
	})
}

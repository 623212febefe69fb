package txretry_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// seen is the span of one call at a time.
type seen struct {
	span   map[string]string
	events []string
	ended  int

	attempts []*seen
}

type tracerProvider struct {
	noop.TracerProvider
	s *seen
}

func (p tracerProvider) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{s: p.s} }

type tracer struct {
	noop.Tracer
	s *seen
}

func (t tracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	if name == "txretry.attempt" {
		attempt := span{s: &seen{span: map[string]string{}}}
		cfg := trace.NewSpanStartConfig(opts...)
		attempt.SetAttributes(cfg.Attributes()...)
		t.s.attempts = append(t.s.attempts, attempt.s)
		return trace.ContextWithSpan(ctx, attempt), attempt
	}
	t.s.span = map[string]string{"name": name}
	span := span{s: t.s}
	return trace.ContextWithSpan(ctx, span), span
}

type span struct {
	noop.Span
	s *seen
}

func (span) IsRecording() bool            { return true }
func (s span) End(...trace.SpanEndOption) { s.s.ended++ }
func (s span) SetAttributes(kvs ...attribute.KeyValue) {
	for _, kv := range kvs {
		s.s.span[strings.TrimPrefix(string(kv.Key), "holdfast.")] = kv.Value.String()
	}
}

func (s span) AddEvent(_ string, opts ...trace.EventOption) {
	cfg := trace.NewEventConfig(opts...)
	set := attribute.NewSet(cfg.Attributes()...)
	s.s.events = append(s.s.events, set.Encoded(attribute.DefaultEncoder()))
}

func TestTelemetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s seen
		var metrics metrictest.Recorder
		m := txretrytest.New(txretrytest.Config{
			Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}, {}, {Point: txretrytest.AtEnd, SQLSTATE: "23505"}},
			Retry: txretry.Config{
				TracerProvider: tracerProvider{s: &s}, MeterProvider: &metrics,
				Rand: func() float64 { return 0.5 },
			},
		})
		work := func(ctx context.Context, _ pgx.Tx) error {
			if !trace.SpanFromContext(ctx).IsRecording() {
				return errors.New("fn does not run under the span")
			}
			return nil
		}
		if err := m.DoWith(t.Context(), txretry.Options{Name: "op"}, work); err != nil {
			t.Fatal(err)
		}
		wantSpan := map[string]string{"name": "txretry.Do", "operation": "op", "outcome": "committed", "attempts": "2", "phase.sleep": "0.1"}
		if !maps.Equal(s.span, wantSpan) || s.ended != 1 {
			t.Errorf("span %v, ended %d times, want %v", s.span, s.ended, wantSpan)
		}
		if want := []string{"holdfast.phase=commit,holdfast.sqlstate=40001"}; !slices.Equal(s.events, want) {
			t.Errorf("events %v, want %v", s.events, want)
		}
		wantAttempts := []map[string]string{{"attempt": "1", "phase": "commit", "sqlstate": "40001"}, {"attempt": "2"}}
		for i, attempt := range s.attempts {
			if i >= len(wantAttempts) || !maps.Equal(attempt.span, wantAttempts[i]) || attempt.ended != 1 {
				t.Errorf("attempt %d has the span %v, ended %d times", i+1, attempt.span, attempt.ended)
			}
		}
		if len(s.attempts) != len(wantAttempts) {
			t.Errorf("%d attempts have spans, want %d", len(s.attempts), len(wantAttempts))
		}
		if err := m.DoWith(t.Context(), txretry.Options{Name: "op"}, work); err == nil {
			t.Error("no error")
		}
		wantPoints := map[string][]float64{
			"holdfast.txretry.duration{operation=op,outcome=committed}":           {0.1},
			"holdfast.txretry.duration{operation=op,outcome=rolled_back}":         {0},
			"holdfast.txretry.attempts{operation=op,outcome=committed}":           {2},
			"holdfast.txretry.attempts{operation=op,outcome=rolled_back}":         {1},
			"holdfast.txretry.phase.duration{operation=op,phase=sleep}":           {0.1},
			"holdfast.txretry.failures{operation=op,phase=commit,sqlstate=40001}": {1},
		}
		if points := metrics.Take(); !maps.EqualFunc(points, wantPoints, slices.Equal) {
			t.Errorf("points %v, want %v", points, wantPoints)
		}
	})
}

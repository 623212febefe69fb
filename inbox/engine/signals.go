package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// outcome is how a delivery was settled.
type outcome string

const (
	acked      outcome = "acked"
	retried    outcome = "retried" // it has failed and comes again as its next attempt
	putOff     outcome = "put_off" // it has not failed and comes again, uncounted
	dead       outcome = "dead"
	returned   outcome = "returned"
	displaced  outcome = "displaced"  // behind the others: no queue took its copy, or it is suspected
	superseded outcome = "superseded" // a leftover: its retry was on its way already
	stale      outcome = "stale"      // its session was over, so the broker delivers it again
)

// maxLabels bounds how many classes the counter tells apart.
const maxLabels = 100

// signals are the metrics and spans of a consumer.
type signals struct {
	cfg      *settings
	kit      telemetry.Kit
	queue    metric.MeasurementOption
	settled  metric.Int64Counter
	sessions metric.Int64Counter
	hanging  metric.Int64Counter
	duration metric.Float64Histogram
	hand     metric.Int64ObservableGauge
	held     metric.Int64ObservableGauge
	depths   *depths

	inHand, waiting atomic.Int64

	mu     sync.Mutex
	labels map[label]metric.MeasurementOption // made once: they are counted with every message
}

type label struct {
	outcome outcome
	class   string // of a failure; empty: none
}

func newSignals(cfg *settings, source driver.Source) (*signals, error) {
	kit := telemetry.New("github.com/holdfast-go/holdfast/inbox/"+cfg.Package, cfg.TracerProvider, cfg.MeterProvider)
	settled, err1 := kit.Meter.Int64Counter(cfg.metric("settled"),
		metric.WithDescription("Deliveries by the way they were settled"))
	sessions, err2 := kit.Meter.Int64Counter(cfg.metric("lost_sessions"),
		metric.WithDescription("Sessions with the broker that failed or could not be opened"))
	hanging, err3 := kit.Meter.Int64Counter(cfg.metric("stuck"),
		metric.WithDescription("Handlers that did not return in time"))
	hand, err4 := kit.Meter.Int64ObservableGauge(cfg.metric("in_hand"),
		metric.WithDescription("Messages that were received and are not settled"))
	held, err5 := kit.Meter.Int64ObservableGauge(cfg.metric("held"),
		metric.WithDescription("Messages in hand that wait for a retry, for a limit or for a place to go"))
	depths, err6 := newDepths(cfg, source, kit.Meter)
	duration, err7 := kit.Meter.Float64Histogram(cfg.metric("process.duration"),
		metric.WithDescription("Duration of one attempt of the processor at a message or a batch"), metric.WithUnit("s"), telemetry.Seconds)
	s := &signals{
		cfg: cfg, kit: kit, settled: settled, sessions: sessions, hanging: hanging, duration: duration,
		hand: hand, held: held, depths: depths,
		queue:  metric.WithAttributes(attribute.String("queue", cfg.Queue)),
		labels: map[label]metric.MeasurementOption{},
	}
	return s, errors.Join(err1, err2, err3, err4, err5, err6, err7)
}

// observe reports the gauges until the returned function is called.
func (s *signals) observe() (stop func()) {
	registration, err := s.kit.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(s.hand, s.inHand.Load(), s.queue)
		o.ObserveInt64(s.held, s.waiting.Load(), s.queue)
		return nil
	}, s.hand, s.held)
	if err != nil {
		return func() {}
	}
	return func() { _ = registration.Unregister() }
}

// count counts settled deliveries. Class is that of their failure, if they failed.
func (s *signals) count(o outcome, class string, n int) {
	if n > 0 {
		s.settled.Add(context.Background(), int64(n), s.label(o, class))
	}
}

func (s *signals) label(o outcome, class string) metric.MeasurementOption {
	s.mu.Lock()
	defer s.mu.Unlock()
	if class != "" && !s.cfg.classes[class] && len(s.labels) > maxLabels {
		class = "other"
	}
	known := s.labels[label{o, class}]
	if known == nil {
		attrs := []attribute.KeyValue{attribute.String("queue", s.cfg.Queue), attribute.String("outcome", string(o))}
		if class != "" {
			attrs = append(attrs, attribute.String("class", class))
		}
		known = metric.WithAttributeSet(attribute.NewSet(attrs...))
		s.labels[label{o, class}] = known
	}
	return known
}

func (s *signals) stuck() { s.hanging.Add(context.Background(), 1, s.queue) }

func (s *signals) lost() { s.sessions.Add(context.Background(), 1, s.queue) }

// clock measures an attempt until the returned function is called.
func (s *signals) clock(ctx context.Context) (stop func()) {
	if !s.duration.Enabled(ctx) {
		return func() {}
	}
	begin := time.Now()
	return func() { s.duration.Record(ctx, time.Since(begin).Seconds(), s.queue) }
}

// span begins the processing of messages; the returned function ends it. It is linked to what has sent
// them, and that of a single message is a part of the sender's trace.
func (s *signals) span(ctx context.Context, msgs []*inbox.Message) (context.Context, func([]error)) {
	if s.kit.Silent() {
		return ctx, func([]error) {}
	}
	links := make([]trace.Link, 0, len(msgs))
	for _, m := range msgs {
		if sender := telemetry.Extract(ctx, m.Headers); sender.IsValid() {
			links = append(links, trace.Link{SpanContext: sender})
		}
	}
	attrs := []attribute.KeyValue{
		attribute.String("messaging.system", s.cfg.traits.System),
		attribute.String("messaging.destination.name", msgs[0].Queue),
	}
	if len(msgs) == 1 {
		if len(links) == 1 {
			ctx = trace.ContextWithRemoteSpanContext(ctx, links[0].SpanContext)
		}
		attrs = append(attrs, telemetry.Operation("process")...)
		attrs = append(attrs, attribute.String("messaging.message.id", msgs[0].ID.String()), attribute.Int("holdfast.attempt", msgs[0].Attempt))
	} else {
		attrs = append(attrs, attribute.Int("messaging.batch.message_count", len(msgs)))
	}
	ctx, span := s.kit.Tracer.Start(ctx, "process "+msgs[0].Queue,
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...), trace.WithAttributes(attrs...))
	return ctx, func(results []error) {
		for _, err := range results {
			if err != nil {
				class := driver.Classify(err).Class
				span.SetAttributes(attribute.String("error.type", class))
				span.SetStatus(codes.Error, class)
				break
			}
		}
		span.End()
	}
}

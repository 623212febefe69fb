package observability

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A message that is sent and processed alone stays in the trace of its writer, also through a second attempt.
func TestSpans(t *testing.T) {
	for _, optIn := range []string{"", "http/dup,messaging"} {
		t.Run("opt in: "+optIn, func(t *testing.T) {
			t.Setenv("OTEL_SEMCONV_STABILITY_OPT_IN", optIn)
			found := travel(t, []string{"order.placed"}, txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"})

			root := found.one(t, "request", 1)
			do := found.one(t, "txretry.Do", 2) // the other one is the handler's
			again := found.one(t, "txretry.attempt", 3)
			create := found.one(t, "create order.placed", 2)
			publish := found.one(t, "outbox.publish", 1)
			send := found.one(t, "send order.placed", 1)
			process := found.one(t, "process billing", 1)
			for _, tc := range []struct {
				child, parent tracetest.SpanStub
			}{{do, root}, {again, do}, {create, again}, {send, create}, {process, create}} {
				if tc.child.Parent.SpanID() != tc.parent.SpanContext.SpanID() || tc.child.SpanContext.TraceID() != root.SpanContext.TraceID() {
					t.Errorf("%q is not below %q", tc.child.Name, tc.parent.Name)
				}
			}
			if !linked(send, create) || !linked(send, publish) || !linked(publish, create) || !linked(process, create) {
				t.Error("links are missing: from send to the writer and its batch, from the batch and from process to the writer")
			}
			for span, kind := range map[*tracetest.SpanStub]trace.SpanKind{
				&create: trace.SpanKindProducer, &publish: trace.SpanKindInternal, &send: trace.SpanKindClient, &process: trace.SpanKindConsumer,
			} {
				if span.SpanKind != kind {
					t.Errorf("%q is of kind %v, want %v", span.Name, span.SpanKind, kind)
				}
			}
			for _, span := range []tracetest.SpanStub{send, process} {
				if system, failed := valueOf(span, "messaging.system"), valueOf(span, "error.type"); system != "memory" || failed != "" {
					t.Errorf("%q has the system %q and the error %q, want memory and none", span.Name, system, failed)
				}
			}
			for span, operation := range map[*tracetest.SpanStub]string{&create: "create", &send: "send", &process: "process"} {
				if optIn == "" {
					operation = ""
				}
				for _, key := range []attribute.Key{"messaging.operation.name", "messaging.operation.type"} {
					if got := valueOf(*span, key); got != operation {
						t.Errorf("%q has %s %q, want %q", span.Name, key, got, operation)
					}
				}
				if valueOf(*span, "messaging.message.id") == "" {
					t.Errorf("%q has no message id", span.Name)
				}
			}
		})
	}
}

// A batch has no parent, because its messages have several writers.
func TestSpansOfABatch(t *testing.T) {
	t.Parallel()
	found := travel(t, slices.Repeat([]string{"order.placed"}, 4))
	batch := found.one(t, "process billing", 1)
	if len(batch.Links) != 4 || batch.Parent.IsValid() {
		t.Errorf("a batch of 4 has %d links and the parent %v", len(batch.Links), batch.Parent)
	}
	for _, s := range found {
		if s.Name == "send order.placed" && !s.Parent.IsValid() {
			t.Error("a message of a batch is not sent in the trace of its writer")
		}
	}
}

// A failed span has the class of the failure.
func TestSpansOfFailures(t *testing.T) {
	t.Parallel()
	found := travel(t, []string{"order.refused", "order.lost"})
	for name, class := range map[string]string{"process billing": "unrecoverable", "send order.lost": "retryable"} {
		all := found.named(name)
		if len(all) == 0 {
			t.Errorf("no span %q", name)
			continue
		}
		span := all[0]
		if got := valueOf(span, "error.type"); got != class || span.Status.Code != codes.Error {
			t.Errorf("%q has the error %q and the status %v, want %s", name, got, span.Status, class)
		}
	}
}

// spans are the exported spans, in the order of their ends.
type spans []tracetest.SpanStub

// named returns the spans with a name.
func (s spans) named(name string) spans {
	return slices.DeleteFunc(slices.Clone(s), func(span tracetest.SpanStub) bool { return span.Name != name })
}

// one returns the first span with a name, or the second one if the operation ran twice. It checks the number of such
// spans.
func (s spans) one(t *testing.T, name string, count int) tracetest.SpanStub {
	t.Helper()
	named := s.named(name)
	if len(named) != count {
		t.Fatalf("%d spans have the name %q, want %d", len(named), name, count)
	}
	if name == "txretry.attempt" || name == "create order.placed" {
		return named[1] // of the second attempt
	}
	return named[0]
}

func linked(from, to tracetest.SpanStub) bool {
	return slices.ContainsFunc(from.Links, func(l sdk.Link) bool { return l.SpanContext.SpanID() == to.SpanContext.SpanID() })
}

func valueOf(s tracetest.SpanStub, key attribute.Key) string {
	for _, kv := range s.Attributes {
		if kv.Key == key {
			return kv.Value.String()
		}
	}
	return ""
}

// travel writes messages in one transaction, publishes and processes them on the fakes, and returns the spans. The
// relay has no transport for order.lost, and the handler of order.refused fails for good.
func travel(t *testing.T, names []string, script ...txretrytest.Fault) (found spans) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		exporter := tracetest.NewInMemoryExporter()
		tracers := sdk.NewTracerProvider(sdk.WithSyncer(exporter))
		p := parts{t: t, log: slog.New(slog.DiscardHandler)}
		store, broker := outboxtest.New(), inboxtest.NewBroker()
		relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{TracerProvider: tracers, Logger: p.log})
		if err != nil {
			t.Fatal(err)
		}
		manager := func(script ...txretrytest.Fault) txretry.Transactor {
			return txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{TracerProvider: tracers}})
		}
		books, err := inboxtest.New(manager(), "billing", inboxpgx.Config{})
		if err == nil {
			err = errors.Join(
				inboxpgx.Handle(books, "order.placed", func(context.Context, pgx.Tx, int) error { return nil }),
				inboxpgx.Handle(books, "order.refused", func(context.Context, pgx.Tx, int) error { return inbox.Unrecoverable(errDown) }))
		}
		if err != nil {
			t.Fatal(err)
		}
		consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, books, inbox.ConsumerConfig{
			Concurrency: 1, Batch: 10, TracerProvider: tracers, Logger: p.log,
		})
		if err != nil {
			t.Fatal(err)
		}
		stopRelay := p.background(relay.Run)
		ctx, root := tracers.Tracer("test").Start(t.Context(), "request", trace.WithSpanKind(trace.SpanKindServer))
		err = manager(script...).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			for _, name := range names {
				m, err := outbox.NewMessage(name, 1)
				if err != nil {
					return err
				}
				if name == "order.lost" {
					m.Transport = "elsewhere"
				}
				if err := store.Write(ctx, tx, m); err != nil {
					return err
				}
			}
			return nil
		})
		root.End()
		if err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		stopConsumer := p.background(consumer.Run) // which receives the whole batch at once
		time.Sleep(time.Minute)
		stopRelay()
		stopConsumer()
		found = spans(exporter.GetSpans())
	})
	return found
}

package observability

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
)

// exported is what the code exports as Prometheus sees it: metric, label, values.
type exported map[string]map[string]map[string]bool

// parts are what the exercises measure with.
type parts struct {
	t        *testing.T
	registry *prometheus.Registry
	meters   metric.MeterProvider
	log      *slog.Logger
}

// exercise runs every package on its fakes, has all go well and wrong, and returns what was exported.
func exercise(t *testing.T) exported {
	t.Helper()
	known := exported{}
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
		if err != nil {
			t.Fatal(err)
		}
		provider := sdk.NewMeterProvider(sdk.WithReader(exporter))
		defer func() {
			if err := provider.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		p := parts{t: t, registry: registry, meters: zeroed{provider}, log: slog.New(slog.DiscardHandler)}
		for _, run := range []func(known exported){
			p.transactions, p.relay, p.consumer, p.orderedConsumer, p.brokers, p.requests, p.limits, p.leases, p.sweeps, p.upkeep,
		} {
			run(known)
			known.gather(t, registry)
		}
	})
	return known
}

// gather adds what the registry holds.
func (e exported) gather(t *testing.T, registry *prometheus.Registry) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		names := []string{family.GetName()}
		if family.GetType().String() == "HISTOGRAM" {
			names = []string{family.GetName() + "_bucket", family.GetName() + "_sum", family.GetName() + "_count"}
		}
		for _, name := range names {
			if e[name] == nil {
				e[name] = map[string]map[string]bool{}
			}
			for _, m := range family.GetMetric() {
				for _, label := range m.GetLabel() {
					if e[name][label.GetName()] == nil {
						e[name][label.GetName()] = map[string]bool{}
					}
					e[name][label.GetName()][label.GetValue()] = true
				}
			}
		}
	}
}

// zeroed has counters exported from the beginning, so that the name of one that nothing counts is known, too.
type zeroed struct{ metric.MeterProvider }

func (z zeroed) Meter(name string, opts ...metric.MeterOption) metric.Meter {
	return zeroedMeter{z.MeterProvider.Meter(name, opts...)}
}

type zeroedMeter struct{ metric.Meter }

func (z zeroedMeter) Int64Counter(name string, opts ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	counter, err := z.Meter.Int64Counter(name, opts...)
	if err == nil {
		counter.Add(context.Background(), 0)
	}
	return counter, err
}

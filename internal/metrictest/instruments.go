package metrictest

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

type meter struct {
	noop.Meter
	r *Recorder
}

func (m meter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{series: series{m.r, name}}, nil
}

func (m meter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return histogram{series: series{m.r, name}}, nil
}

func (m meter) Int64Gauge(name string, _ ...metric.Int64GaugeOption) (metric.Int64Gauge, error) {
	return intGauge{series: series{m.r, name}}, nil
}

func (m meter) Float64Gauge(name string, _ ...metric.Float64GaugeOption) (metric.Float64Gauge, error) {
	return floatGauge{series: series{m.r, name}}, nil
}

// series is what the instruments have in common.
type series struct {
	r    *Recorder
	name string
}

func (s series) add(v float64, set attribute.Set) {
	s.r.update(keyOf(s.name, set), func(values []float64) []float64 {
		for _, sum := range values {
			v += sum
		}
		return []float64{v}
	})
}

func (s series) set(v float64, set attribute.Set) {
	s.r.update(keyOf(s.name, set), func([]float64) []float64 { return []float64{v} })
}

func (s series) record(v float64, set attribute.Set) {
	s.r.update(keyOf(s.name, set), func(values []float64) []float64 { return append(values, v) })
}

type counter struct {
	noop.Int64Counter
	series
}

func (counter) Enabled(context.Context) bool { return true }
func (c counter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	c.add(float64(n), metric.NewAddConfig(opts).Attributes())
}

type histogram struct {
	noop.Float64Histogram
	series
}

func (histogram) Enabled(context.Context) bool { return true }
func (h histogram) Record(_ context.Context, v float64, opts ...metric.RecordOption) {
	h.record(v, metric.NewRecordConfig(opts).Attributes())
}

type intGauge struct {
	noop.Int64Gauge
	series
}

func (intGauge) Enabled(context.Context) bool { return true }
func (g intGauge) Record(_ context.Context, v int64, opts ...metric.RecordOption) {
	g.set(float64(v), metric.NewRecordConfig(opts).Attributes())
}

type floatGauge struct {
	noop.Float64Gauge
	series
}

func (floatGauge) Enabled(context.Context) bool { return true }
func (g floatGauge) Record(_ context.Context, v float64, opts ...metric.RecordOption) {
	g.set(v, metric.NewRecordConfig(opts).Attributes())
}

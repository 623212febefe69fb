// Package metrictest records OpenTelemetry measurements for tests to compare.
//
// The key of a measurement is its instrument's name and attributes, as in "requests" or
// "requests{method=GET,status=200}".
package metrictest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Recorder is a MeterProvider whose instruments are all enabled. It keeps the sum of a counter, the
// last value of a gauge, and every value of a histogram in order. Its zero value is ready for use.
// It is safe for concurrent use.
type Recorder struct {
	noop.MeterProvider

	mu        sync.Mutex
	values    map[string][]float64
	callbacks map[*registration]bool
}

// Meter returns a meter that records into r, for any scope.
func (r *Recorder) Meter(string, ...metric.MeterOption) metric.Meter { return meter{r: r} }

// Values returns the values recorded under a key; one value for a counter or a gauge.
func (r *Recorder) Values(key string) []float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.values[key])
}

// Take returns all recorded values and forgets them.
func (r *Recorder) Take() map[string][]float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	values := r.values
	r.values = nil
	return values
}

// Collect does the work of a reader: it calls the callbacks, and returns the observed values.
func (r *Recorder) Collect(ctx context.Context) (map[string]float64, error) {
	r.mu.Lock()
	callbacks := slices.Collect(maps.Keys(r.callbacks))
	r.mu.Unlock()
	o := observer{seen: map[string]float64{}}
	var errs []error
	for _, c := range callbacks {
		errs = append(errs, c.fn(ctx, o))
	}
	return o.seen, errors.Join(errs...)
}

// update replaces the values under a key.
func (r *Recorder) update(key string, fn func(values []float64) []float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.values == nil {
		r.values = map[string][]float64{}
	}
	r.values[key] = fn(r.values[key])
}

func keyOf(name string, set attribute.Set) string {
	if set.Len() == 0 {
		return name
	}
	return name + "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
}

func (m meter) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	return observedInt{name: name}, nil
}

func (m meter) Int64ObservableUpDownCounter(name string, _ ...metric.Int64ObservableUpDownCounterOption) (metric.Int64ObservableUpDownCounter, error) {
	return observedSum{name: name}, nil
}

func (m meter) Float64ObservableGauge(name string, _ ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	return observedFloat{name: name}, nil
}

func (m meter) RegisterCallback(fn metric.Callback, _ ...metric.Observable) (metric.Registration, error) {
	c := &registration{r: m.r, fn: fn}
	m.r.mu.Lock()
	defer m.r.mu.Unlock()
	if m.r.callbacks == nil {
		m.r.callbacks = map[*registration]bool{}
	}
	m.r.callbacks[c] = true
	return c, nil
}

type registration struct {
	noop.Registration
	r  *Recorder
	fn metric.Callback
}

func (c *registration) Unregister() error {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	delete(c.r.callbacks, c)
	return nil
}

type observedInt struct {
	noop.Int64ObservableGauge
	name string
}

type observedSum struct {
	noop.Int64ObservableUpDownCounter
	name string
}

type observedFloat struct {
	noop.Float64ObservableGauge
	name string
}

type observer struct {
	noop.Observer
	seen map[string]float64
}

func (o observer) ObserveInt64(g metric.Int64Observable, v int64, opts ...metric.ObserveOption) {
	if sum, ok := g.(observedSum); ok {
		o.seen[keyOf(sum.name, metric.NewObserveConfig(opts).Attributes())] += float64(v)
		return
	}
	o.seen[keyOf(g.(observedInt).name, metric.NewObserveConfig(opts).Attributes())] = float64(v)
}

func (o observer) ObserveFloat64(g metric.Float64Observable, v float64, opts ...metric.ObserveOption) {
	o.seen[keyOf(g.(observedFloat).name, metric.NewObserveConfig(opts).Attributes())] = v
}

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

// series is the common part of the instruments.
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

package outbox_test

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

// readings is a MeterProvider that keeps what histograms record and gauges observe, by name and
// attributes.
type readings struct {
	noop.MeterProvider
	mu        sync.Mutex
	recorded  map[string][]float64
	callbacks map[*callback]bool
}

type callback struct {
	noop.Registration
	r  *readings
	fn metric.Callback
}

func newReadings() *readings {
	return &readings{recorded: map[string][]float64{}, callbacks: map[*callback]bool{}}
}

func (r *readings) Meter(string, ...metric.MeterOption) metric.Meter { return readingsMeter{r: r} }

type readingsMeter struct {
	noop.Meter
	r *readings
}

func (m readingsMeter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return readingsHistogram{r: m.r, name: name}, nil
}

func (m readingsMeter) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	return intGauge{name: name}, nil
}

func (m readingsMeter) Float64ObservableGauge(name string, _ ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	return floatGauge{name: name}, nil
}

func (m readingsMeter) RegisterCallback(fn metric.Callback, _ ...metric.Observable) (metric.Registration, error) {
	c := &callback{r: m.r, fn: fn}
	m.r.mu.Lock()
	defer m.r.mu.Unlock()
	m.r.callbacks[c] = true
	return c, nil
}

func (c *callback) Unregister() error {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	delete(c.r.callbacks, c)
	return nil
}

type readingsHistogram struct {
	noop.Float64Histogram
	r    *readings
	name string
}

func (h readingsHistogram) Record(_ context.Context, v float64, opts ...metric.RecordOption) {
	set := metric.NewRecordConfig(opts).Attributes()
	h.r.mu.Lock()
	defer h.r.mu.Unlock()
	h.r.recorded[h.name+label(set)] = append(h.r.recorded[h.name+label(set)], v)
}

type intGauge struct {
	noop.Int64ObservableGauge
	name string
}

type floatGauge struct {
	noop.Float64ObservableGauge
	name string
}

type observer struct {
	noop.Observer
	seen map[string]float64
}

func (o observer) ObserveInt64(g metric.Int64Observable, v int64, opts ...metric.ObserveOption) {
	o.seen[g.(intGauge).name+label(metric.NewObserveConfig(opts).Attributes())] = float64(v)
}

func (o observer) ObserveFloat64(g metric.Float64Observable, v float64, opts ...metric.ObserveOption) {
	o.seen[g.(floatGauge).name+label(metric.NewObserveConfig(opts).Attributes())] = v
}

func label(set attribute.Set) string {
	if set.Len() == 0 {
		return ""
	}
	return "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
}

// collect is what a reader does.
func (r *readings) collect(ctx context.Context) (map[string]float64, error) {
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

func (r *readings) of(name string) []float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.recorded[name])
}

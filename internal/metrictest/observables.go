package metrictest

import (
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

func (m meter) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	return observedInt{name: name}, nil
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

type observedFloat struct {
	noop.Float64ObservableGauge
	name string
}

type observer struct {
	noop.Observer
	seen map[string]float64
}

func (o observer) ObserveInt64(g metric.Int64Observable, v int64, opts ...metric.ObserveOption) {
	o.seen[keyOf(g.(observedInt).name, metric.NewObserveConfig(opts).Attributes())] = float64(v)
}

func (o observer) ObserveFloat64(g metric.Float64Observable, v float64, opts ...metric.ObserveOption) {
	o.seen[keyOf(g.(observedFloat).name, metric.NewObserveConfig(opts).Attributes())] = v
}

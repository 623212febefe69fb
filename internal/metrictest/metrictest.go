// Package metrictest keeps what code records with OpenTelemetry, for a test to compare.
//
// A measurement goes by its instrument's name and attributes, as in "requests" or
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

// Recorder is a MeterProvider whose instruments are all enabled. Of a counter it keeps the
// sum, of a gauge the last value, of a histogram every value in order. Its zero value is
// ready for use. It is safe for concurrent use.
type Recorder struct {
	noop.MeterProvider

	mu        sync.Mutex
	values    map[string][]float64
	callbacks map[*registration]bool
}

// Meter returns the meter of every scope.
func (r *Recorder) Meter(string, ...metric.MeterOption) metric.Meter { return meter{r: r} }

// Values returns what was recorded under a name and attributes; of a counter and a gauge that
// is one value.
func (r *Recorder) Values(key string) []float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.values[key])
}

// Take returns everything that was recorded, and forgets it.
func (r *Recorder) Take() map[string][]float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	values := r.values
	r.values = nil
	return values
}

// Collect does what a reader does: it calls the callbacks, and returns what they observe.
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

package idempotency_test

import (
	"context"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// tally is a MeterProvider that counts by the attribute result.
type tally struct {
	noop.MeterProvider
	mu sync.Mutex
	by map[string]int64
}

func (c *tally) Meter(string, ...metric.MeterOption) metric.Meter { return tallyMeter{c: c} }

type tallyMeter struct {
	noop.Meter
	c *tally
}

func (m tallyMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return tallyCounter{c: m.c}, nil
}

type tallyCounter struct {
	noop.Int64Counter
	c *tally
}

func (n tallyCounter) Add(_ context.Context, incr int64, opts ...metric.AddOption) {
	set := metric.NewAddConfig(opts).Attributes()
	outcome, _ := set.Value("result")
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	n.c.by[outcome.AsString()] += incr
}

func TestEachRequestIsCountedOnce(t *testing.T) {
	t.Parallel()
	kept := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }
	settle := func(replayed bool) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			claim, _ := idempotency.ClaimFrom(r.Context())
			claim.Settle(idempotency.Outcome{
				State: idempotency.Completed, Fingerprint: claim.Fingerprint, Response: idempotency.Response{Status: 201},
			}, replayed)
		}
	}
	memory := func() *faulty { return &faulty{Store: idempotencytest.NewStore()} }
	lost := memory()
	for name, tt := range map[string]struct {
		store    *faulty
		fn       http.HandlerFunc
		requests int
		want     map[string]int64
	}{
		"kept":       {memory(), kept, 3, map[string]int64{"completed": 1, "replayed": 2}},
		"not kept":   {memory(), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 2, map[string]int64{"released": 2}},
		"too large":  {memory(), func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 2<<20)) }, 2, map[string]int64{"tombstoned": 1, "result_unavailable": 1}},
		"store down": {&faulty{begin: down}, kept, 1, map[string]int64{"store_unavailable": 1}},
		"not stored": {&faulty{Store: idempotencytest.NewStore(), complete: down}, kept, 2, map[string]int64{"persist_failed": 1, "in_use": 1}},
		"settled":    {memory(), settle(false), 2, map[string]int64{"completed": 1, "replayed": 1}},
		"settled without an answer": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := idempotency.ClaimFrom(r.Context())
			claim.Settle(idempotency.Outcome{State: idempotency.Completed, Fingerprint: claim.Fingerprint}, false)
		}, 2, map[string]int64{"tombstoned": 1, "result_unavailable": 1}},
		"settled replayed": {memory(), settle(true), 2, map[string]int64{"replayed": 2}},
		"settled replayed, then a panic": {memory(), func(w http.ResponseWriter, r *http.Request) {
			settle(true)(w, r)
			panic(http.ErrAbortHandler)
		}, 2, map[string]int64{"replayed": 2}},
		"settled replayed, then streamed": {memory(), func(w http.ResponseWriter, r *http.Request) {
			settle(true)(w, r)
			streamed(http.StatusCreated)(w)
		}, 2, map[string]int64{"replayed": 2}},
		"lease lost": {lost, func(w http.ResponseWriter, r *http.Request) {
			claim, _ := idempotency.ClaimFrom(r.Context())
			if err := lost.Store.Release(r.Context(), claim); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
		}, 1, map[string]int64{"lease_lost": 1}},
	} {
		c := &tally{by: map[string]int64{}}
		h := protect(t, tt.store, idempotency.MiddlewareConfig{MeterProvider: c}, tt.fn)
		for range tt.requests {
			sendRecovering(h, post(goodKey, strings.NewReader("x")))
		}
		if !maps.Equal(c.by, tt.want) {
			t.Errorf("%s: %v, want %v", name, c.by, tt.want)
		}
	}
}

// A function of the service that panics leaves a count with a result, too.
func TestPanicsAreCounted(t *testing.T) {
	t.Parallel()
	c := &tally{by: map[string]int64{}}
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{
		MeterProvider: c,
		Scope: func(r *http.Request) (string, error) {
			if r.Header.Get("X-User") == "" {
				panic("no user")
			}
			return "user", nil
		},
		OnReplay: func(*http.Request) { panic("no limiter") },
	}, func(http.ResponseWriter, *http.Request) {})
	for _, user := range []string{"", "ann", "ann"} {
		r := post(goodKey, nil)
		r.Header.Set("X-User", user)
		sendRecovering(h, r)
	}
	if want := map[string]int64{"invalid": 1, "completed": 1, "replayed": 1}; !maps.Equal(c.by, want) {
		t.Errorf("counted %v, want %v", c.by, want)
	}
}

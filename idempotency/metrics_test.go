package idempotency_test

import (
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

func TestEachRequestIsCountedOnce(t *testing.T) {
	t.Parallel()
	kept := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }
	settle := func(replayed bool) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.Settle(driver.BeginResult{
				State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response{Status: 201},
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
		"kept":      {memory(), kept, 3, map[string]int64{"completed": 1, "replayed": 2}},
		"not kept":  {memory(), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 2, map[string]int64{"released": 2}},
		"too large": {memory(), func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 2<<20)) }, 2, map[string]int64{"tombstoned": 1, "result_unavailable": 1}},
		"refused for want of the store": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.MarkUnavailable()
			w.WriteHeader(503)
		}, 2, map[string]int64{"store_unavailable": 2}},
		"refused, and answered all the same": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.MarkUnavailable()
			w.WriteHeader(409)
		}, 2, map[string]int64{"completed": 1, "replayed": 1}},
		"refused, and done at the second try": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.MarkUnavailable()
			settle(false)(w, r)
		}, 2, map[string]int64{"completed": 1, "replayed": 1}},
		"store down": {&faulty{begin: down}, kept, 1, map[string]int64{"store_unavailable": 1}},
		"not stored": {&faulty{Store: idempotencytest.NewStore(), complete: down}, kept, 2, map[string]int64{"persist_failed": 1, "in_use": 1}},
		"settled":    {memory(), settle(false), 2, map[string]int64{"completed": 1, "replayed": 1}},
		"settled without an answer": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.Settle(driver.BeginResult{State: driver.Completed, Fingerprint: claim.Fingerprint}, false)
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
			claim, _ := driver.ClaimFrom(r.Context())
			if err := lost.Store.Release(r.Context(), claim); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
		}, 1, map[string]int64{"lease_lost": 1}},
	} {
		var r metrictest.Recorder
		h := protect(t, tt.store, idempotency.MiddlewareConfig{MeterProvider: &r}, tt.fn)
		for range tt.requests {
			sendRecovering(h, post(goodKey, strings.NewReader("x")))
		}
		if got := counted(&r); !maps.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// A function of the service that panics leaves a count with a result, too.
func TestPanicsAreCounted(t *testing.T) {
	t.Parallel()
	var r metrictest.Recorder
	user := func(r *http.Request) (string, error) {
		if r.Header.Get("X-User") == "" {
			panic("no user")
		}
		return "user", nil
	}
	h := protectIn(t, user, idempotencytest.NewStore(), idempotency.MiddlewareConfig{
		MeterProvider: &r,
		OnReplay:      func(*http.Request) { panic("no limiter") },
	}, func(http.ResponseWriter, *http.Request) {})
	for _, user := range []string{"", "ann", "ann"} {
		req := post(goodKey, nil)
		req.Header.Set("X-User", user)
		sendRecovering(h, req)
	}
	if got, want := counted(&r), (map[string]int64{"invalid": 1, "completed": 1, "replayed": 1}); !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}

package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

func TestNeed(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{
		Need: func(r *http.Request) idempotency.Need {
			switch r.URL.Path {
			case "/optional":
				return idempotency.KeyOptional
			case "/ignored":
				return idempotency.KeyIgnored
			}
			return idempotency.DefaultNeed(r)
		},
	}, func(w http.ResponseWriter, r *http.Request) {
		_, claimed := idempotency.ClaimFrom(r.Context())
		fmt.Fprint(w, claimed)
	})
	for _, tt := range []struct {
		method, path, key string
		status            int
		body              string
	}{
		{"POST", "/", "", 400, ""},
		{"POST", "/", goodKey, 200, "true"},
		{"GET", "/", goodKey, 200, "false"},
		{"DELETE", "/optional", "", 200, "false"},
		{"POST", "/optional", "", 200, "false"},
		{"DELETE", "/optional", string(idempotency.NewKey()), 200, "true"},
		{"POST", "/optional", "malformed", 400, ""},
		{"POST", "/ignored", "", 200, "false"},
		{"POST", "/ignored", "malformed", 200, "false"},
	} {
		r := httptest.NewRequest(tt.method, tt.path, nil)
		if tt.key != "" {
			r.Header.Set(idempotency.Header, tt.key)
		}
		if rec := send(h, r); rec.Code != tt.status || tt.body != "" && rec.Body.String() != tt.body {
			t.Errorf("%s %s %q: %d %s; want %d %s", tt.method, tt.path, tt.key, rec.Code, rec.Body, tt.status, tt.body)
		}
	}
}

func TestStoreDownByRoute(t *testing.T) {
	t.Parallel()
	runs, fallback := 0, idempotencytest.NewStore()
	var metrics metrictest.Recorder
	h := protect(t, &faulty{begin: down}, idempotency.MiddlewareConfig{
		Fallback:      fallback,
		MeterProvider: &metrics,
		StoreDown: func(r *http.Request) idempotency.StoreDown {
			return map[string]idempotency.StoreDown{
				"/open": idempotency.FailOpen, "/back": idempotency.FallBack, "/closed": idempotency.FailClosed,
			}[r.URL.Path]
		},
	}, func(w http.ResponseWriter, r *http.Request) {
		runs++
		if _, ok := idempotency.ClaimFrom(r.Context()); !ok {
			t.Errorf("%s: no claim", r.URL.Path)
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "run %d", runs)
	})
	for _, tt := range []struct {
		path, body, replayed, bypassed string
		status                         int
	}{
		{"/closed", "", "", "", 503},
		{"/back", "run 1", "", "", 201},
		{"/back", "run 1", "true", "", 201},
		{"/open", "run 2", "", "true", 201},
		{"/open", "run 3", "", "true", 201},
	} {
		r := httptest.NewRequest(http.MethodPost, tt.path, nil)
		r.Header.Set(idempotency.Header, goodKey)
		rec := send(h, r)
		header := rec.Header()
		if rec.Code != tt.status || tt.body != "" && rec.Body.String() != tt.body ||
			header.Get(idempotency.ReplayedHeader) != tt.replayed || header.Get(idempotency.BypassedHeader) != tt.bypassed {
			t.Errorf("%s: %d %s %v; want %+v", tt.path, rec.Code, rec.Body, header, tt)
		}
	}
	if got, want := counted(&metrics), (map[string]int64{"store_unavailable": 1, "completed": 1, "replayed": 1, "bypassed": 2}); !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}

func TestFallback(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		cfg    idempotency.MiddlewareConfig
		status int
	}{
		"by default":      {idempotency.MiddlewareConfig{Fallback: idempotencytest.NewStore()}, 200},
		"down, too":       {idempotency.MiddlewareConfig{Fallback: &faulty{begin: down}}, 503},
		"there is none":   {idempotency.MiddlewareConfig{StoreDown: func(*http.Request) idempotency.StoreDown { return idempotency.FallBack }}, 503},
		"nothing is said": {idempotency.MiddlewareConfig{}, 503},
	} {
		h := protect(t, &faulty{begin: down}, tt.cfg, func(http.ResponseWriter, *http.Request) {})
		if rec := send(h, post(goodKey, nil)); rec.Code != tt.status {
			t.Errorf("%s: %d, want %d", name, rec.Code, tt.status)
		}
	}
}

// A store that hangs is waited for as long as StoreTimeout says, no longer.
func TestStoreHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		h := protect(t, hanging{idempotencytest.NewStore()}, idempotency.MiddlewareConfig{StoreTimeout: 2 * time.Second}, unreached(t))
		wantCode(t, "hangs", send(h, post(goodKey, nil)), 503, idempotency.CodeStoreUnavailable)
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("waited %v", took)
		}
	})
}

type hanging struct{ idempotency.Store }

func (hanging) Begin(ctx context.Context, _ idempotency.Claim) (idempotency.Outcome, error) {
	deadline, ok := ctx.Deadline()
	<-ctx.Done()
	if !ok || time.Now().Before(deadline) {
		return idempotency.Outcome{}, errors.New("not the deadline")
	}
	return idempotency.Outcome{}, ctx.Err()
}

// The duration of a streamed answer is that of all of it.
func TestDurationOfAStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var took time.Duration
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{Hooks: idempotency.Hooks{
			OnDone: func(_ context.Context, d idempotency.Done) { took = d.Duration },
		}}, func(w http.ResponseWriter, _ *http.Request) {
			streamed(http.StatusOK)(w)
			time.Sleep(time.Minute)
		})
		if send(h, post(goodKey, nil)); took != time.Minute {
			t.Errorf("took %v", took)
		}
	})
}

func TestHooks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var seen []string
		store := &faulty{Store: idempotencytest.NewStore()}
		h := protect(t, store, idempotency.MiddlewareConfig{Hooks: idempotency.Hooks{
			OnAcquired:  func(_ context.Context, c idempotency.Claim) { seen = append(seen, "acquired "+string(c.Key)) },
			OnLeaseLost: func(_ context.Context, c idempotency.Claim) { seen = append(seen, "lost "+string(c.Key)) },
			OnDone: func(_ context.Context, d idempotency.Done) {
				seen = append(seen, fmt.Sprint("done ", d.Key, " ", d.Result, " ", d.Duration, " ", d.Err != nil))
			},
		}}, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				<-r.Context().Done()
				if !errors.Is(context.Cause(r.Context()), idempotency.ErrLeaseLost) {
					t.Errorf("cause %v", context.Cause(r.Context()))
				}
			}
			w.WriteHeader(http.StatusCreated)
		})
		send(h, post("malformed", nil))
		send(h, post(goodKey, nil))
		send(h, post(goodKey, nil))
		send(h, post(goodKey, strings.NewReader("other")))
		store.extend = func() error { return idempotency.ErrLeaseLost }
		store.complete = store.extend
		slow := httptest.NewRequest(http.MethodPost, "/slow", nil)
		other := string(idempotency.NewKey())
		slow.Header.Set(idempotency.Header, other)
		send(h, slow)
		want := []string{
			"done  invalid 0s true",
			"acquired " + goodKey, "done " + goodKey + " completed 0s false",
			"done " + goodKey + " replayed 0s false",
			"done " + goodKey + " reused 0s true",
			"acquired " + other, "lost " + other, "done " + other + " lease_lost 10s true",
		}
		if !slices.Equal(seen, want) {
			t.Errorf("hooks saw\n%s\nwant\n%s", strings.Join(seen, "\n"), strings.Join(want, "\n"))
		}
	})
}

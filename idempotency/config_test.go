package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

func TestMiddlewareConfig(t *testing.T) {
	t.Parallel()
	_, err := idempotency.NewMiddleware(nil, nil, idempotency.MiddlewareConfig{
		KeepHeaders:     []string{"Set-Cookie"},
		MaxRequestBytes: -1, MaxResponseBytes: -1, Documentation: "/docs",
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{"store", "scope", "KeepHeaders", "MaxRequestBytes", "MaxResponseBytes", "Documentation"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("error does not name %s: %v", field, err)
		}
	}
}

const mebibyte = 1 << 20

func TestDefaultRequestLimit(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
	if rec := send(h, post(goodKey, strings.NewReader(strings.Repeat("x", mebibyte)))); rec.Code != 200 {
		t.Errorf("1 MiB: %d", rec.Code)
	}
	more := post(string(idempotency.NewKey()), strings.NewReader(strings.Repeat("x", mebibyte+1)))
	wantCode(t, "a byte more", send(h, more), 413, "REQUEST_TOO_LARGE")
}

func TestDefaultResponseLimit(t *testing.T) {
	t.Parallel()
	for size, status := range map[int]int{mebibyte: 200, mebibyte + 1: 409} {
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Set-Cookie", "not kept, not counted")
			_, _ = w.Write(make([]byte, size))
		})
		send(h, post(goodKey, nil))
		if rec := send(h, post(goodKey, nil)); rec.Code != status {
			t.Errorf("%d bytes: %d again, want %d", size, rec.Code, status)
		}
	}
}

func TestDefaultKeepHeaders(t *testing.T) {
	t.Parallel()
	kept := []string{
		"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Type", "Etag",
		"Last-Modified", "Link", "Location", "X-Content-Type-Options",
	}
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range append(kept, "X-Other", "Vary", "Server") {
			w.Header().Set(name, "value")
		}
		w.WriteHeader(http.StatusCreated)
	})
	send(h, post(goodKey, nil))
	again := send(h, post(goodKey, nil)).Header()
	for _, name := range kept {
		if again.Get(name) != "value" {
			t.Errorf("%s is not in the replay", name)
		}
	}
	if len(again) != len(kept)+2 { // Content-Length, and the mark
		t.Errorf("replayed headers %v", again)
	}
}

// final reports whether a status is kept by default.
func final(status int) bool {
	return status != 401 && status != 408 && status != 425 && status != 429 && status != 499 && status < 500
}

func TestDefaultKeep(t *testing.T) {
	t.Parallel()
	for status := 200; status < 600; status++ {
		runs := 0
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
			runs++
			w.WriteHeader(status)
		})
		send(h, post(goodKey, nil))
		send(h, post(goodKey, nil))
		if final(status) != (runs == 1) {
			t.Errorf("%d: %d runs", status, runs)
		}
	}
}

func TestMethodsAndOptional(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	for path, cfg := range map[string]idempotency.MiddlewareConfig{
		"/":         {},
		"/optional": {Optional: true, Methods: []string{http.MethodPost, http.MethodDelete}},
		"/ignored":  {Methods: []string{}},
	} {
		mux.Handle(path, protect(t, idempotencytest.NewStore(), cfg, func(w http.ResponseWriter, r *http.Request) {
			_, claimed := driver.ClaimFrom(r.Context())
			fmt.Fprint(w, claimed)
		}))
	}
	for _, tt := range []struct {
		method, path, key string
		status            int
		body              string
	}{
		{"POST", "/", "", 400, ""},
		{"POST", "/", goodKey, 200, "true"},
		{"GET", "/", goodKey, 200, "false"},
		{"HEAD", "/", "", 200, ""},
		{"OPTIONS", "/", "", 200, "false"},
		{"DELETE", "/", goodKey, 200, "false"},
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
		if rec := send(mux, r); rec.Code != tt.status || tt.body != "" && rec.Body.String() != tt.body {
			t.Errorf("%s %s %q: %d %s; want %d %s", tt.method, tt.path, tt.key, rec.Code, rec.Body, tt.status, tt.body)
		}
	}
}

// twoTiers is a store with a fallback.
type twoTiers struct {
	driver.Store
	behind driver.Store
}

func (s twoTiers) Fallback() driver.Store { return s.behind }

func TestFailOpenByRoute(t *testing.T) {
	t.Parallel()
	runs := 0
	var metrics metrictest.Recorder
	h := protect(t, &faulty{begin: down}, idempotency.MiddlewareConfig{
		MeterProvider: &metrics,
		FailOpen:      func(r *http.Request) bool { return r.URL.Path != "/closed" },
	}, func(w http.ResponseWriter, r *http.Request) {
		runs++
		claim, ok := driver.ClaimFrom(r.Context())
		if !ok {
			t.Errorf("%s: no claim", r.URL.Path)
		}
		switch r.URL.Path {
		case "/refused": // the handler used the store itself
			claim.MarkUnavailable()
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		case "/tried": // and continued without it
			claim.MarkUnavailable()
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "run %d", runs)
	})
	for _, tt := range []struct {
		path, body, bypassed string
		status               int
	}{
		{"/closed", "", "", 503},
		{"/open", "run 1", "true", 201},
		{"/open", "run 2", "true", 201},
		{"/refused", "", "true", 503},
		{"/tried", "run 4", "true", 201},
	} {
		r := httptest.NewRequest(http.MethodPost, tt.path, nil)
		r.Header.Set(idempotency.Header, goodKey)
		rec := send(h, r)
		header := rec.Header()
		if rec.Code != tt.status || tt.body != "" && rec.Body.String() != tt.body ||
			header.Get(idempotency.ReplayedHeader) != "" || header.Get("Idempotency-Bypassed") != tt.bypassed {
			t.Errorf("%s: %d %s %v; want %+v", tt.path, rec.Code, rec.Body, header, tt)
		}
	}
	if got, want := counted(&metrics), (map[string]int64{"store_unavailable": 2, "bypassed": 3}); !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}

func TestFallback(t *testing.T) {
	t.Parallel()
	open := func(*http.Request) bool { return true }
	for name, tt := range map[string]struct {
		behind   driver.Store
		failOpen func(*http.Request) bool
		status   int
		bypassed string
		counted  int64
	}{
		"works":                       {idempotencytest.NewStore(), nil, 200, "", 2},
		"works, the route would open": {idempotencytest.NewStore(), open, 200, "", 2},
		"down, too":                   {&faulty{begin: down}, nil, 503, "", 2},
		"down, too, the route opens":  {&faulty{begin: down}, open, 200, "true", 2},
		"there is none":               {nil, nil, 503, "", 0},
	} {
		var metrics metrictest.Recorder
		cfg := idempotency.MiddlewareConfig{FailOpen: tt.failOpen, MeterProvider: &metrics}
		h := protect(t, twoTiers{&faulty{begin: down}, tt.behind}, cfg, func(http.ResponseWriter, *http.Request) {})
		rec := send(h, post(goodKey, nil))
		if rec.Code != tt.status || rec.Header().Get("Idempotency-Bypassed") != tt.bypassed {
			t.Errorf("%s: %d %v, want %d", name, rec.Code, rec.Header(), tt.status)
		}
		again := send(h, post(goodKey, nil)) // replayed by the fallback that took the key
		if replayed := again.Header().Get(idempotency.ReplayedHeader) != ""; replayed != strings.HasPrefix(name, "works") {
			t.Errorf("%s: again %d %v", name, again.Code, again.Header())
		}
		if n := metrics.Take()["holdfast.idempotency.fallbacks"]; len(n) != int(tt.counted/2) || tt.counted == 2 && n[0] != 2 {
			t.Errorf("%s: fallbacks counted %v, want %d", name, n, tt.counted)
		}
	}
}

// The middleware waits 5 s for a store that hangs, and 5 s more for its fallback.
func TestStoreHangs(t *testing.T) {
	t.Parallel()
	for want, store := range map[time.Duration]driver.Store{
		5 * time.Second:  hanging{idempotencytest.NewStore()},
		10 * time.Second: twoTiers{hanging{idempotencytest.NewStore()}, hanging{idempotencytest.NewStore()}},
	} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			h := protect(t, store, idempotency.MiddlewareConfig{}, unreached(t))
			wantCode(t, "hangs", send(h, post(goodKey, nil)), 503, "IDEMPOTENCY_STORE_UNAVAILABLE")
			if took := time.Since(start); took != want {
				t.Errorf("waited %v, want %v", took, want)
			}
			start = time.Now()
			_, _, err := idempotency.Do(t.Context(), store, goodKey, fp, func(context.Context) (int, error) { return 0, nil })
			if took := time.Since(start); err == nil || took != want {
				t.Errorf("Do: %v after %v", err, took)
			}
		})
	}
}

type hanging struct{ driver.Store }

func (hanging) Begin(ctx context.Context, _ driver.Claim) (driver.BeginResult, error) {
	deadline, ok := ctx.Deadline()
	<-ctx.Done()
	if !ok || time.Now().Before(deadline) {
		return driver.BeginResult{}, errors.New("not the deadline")
	}
	return driver.BeginResult{}, ctx.Err()
}

// The duration of a streamed answer includes the whole stream.
func TestDurationOfAStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var metrics metrictest.Recorder
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MeterProvider: &metrics}, func(w http.ResponseWriter, _ *http.Request) {
			streamed(http.StatusOK)(w)
			time.Sleep(time.Minute)
		})
		send(h, post(goodKey, nil))
		if took := metrics.Take()["holdfast.idempotency.duration{result=tombstoned}"]; len(took) != 1 || took[0] != 60 {
			t.Errorf("took %v", took)
		}
	})
}

// A handler that loses its lease is cancelled, and this is logged.
func TestLeaseLostIsLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		store := &faulty{Store: idempotencytest.NewStore(), extend: func() error { return idempotency.ErrLeaseLost }}
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			Logger: slog.New(slog.NewTextHandler(&out, nil)),
		})
		must(t, err)
		start := time.Now()
		send(protect(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			if cause := context.Cause(r.Context()); !errors.Is(cause, idempotency.ErrLeaseLost) || time.Since(start) != 10*time.Second {
				t.Errorf("cause %v after %v", cause, time.Since(start))
			}
		})), post(goodKey, nil))
		if line := out.String(); !strings.Contains(line, "lease lost") || strings.Contains(line, goodKey) {
			t.Errorf("log %q", line)
		}
	})
}

// A forgotten setting never makes callers share answers.
func TestGlobalScope(t *testing.T) {
	t.Parallel()
	caller := func(r *http.Request) []string { return []string{r.Header.Get("X-User")} }
	wrapped := func(r *http.Request) (string, error) { return idempotency.GlobalScope(r) }
	for name, tt := range map[string]struct {
		scope           func(*http.Request) (string, error)
		parts           func(*http.Request) []string
		refused         bool
		alice, stranger int
	}{
		"without the caller":          {scope: idempotency.GlobalScope, refused: true},
		"with the caller":             {scope: idempotency.GlobalScope, parts: caller, alice: 200, stranger: 422},
		"behind a function":           {scope: wrapped, alice: 500, stranger: 500},
		"behind a function, callers":  {scope: wrapped, parts: caller, alice: 200, stranger: 422},
		"unsafe":                      {scope: idempotency.UnsafeGlobalScope, alice: 200, stranger: 200},
		"unsafe, and with the caller": {scope: idempotency.UnsafeGlobalScope, parts: caller, alice: 200, stranger: 422},
	} {
		protect, err := idempotency.NewMiddleware(idempotencytest.NewStore(), tt.scope, idempotency.MiddlewareConfig{
			FingerprintParts: tt.parts, Logger: slog.New(slog.DiscardHandler),
		})
		if refused := err != nil && strings.Contains(err.Error(), "UnsafeGlobalScope"); refused != tt.refused {
			t.Errorf("%s: NewMiddleware returned %v", name, err)
		}
		if err != nil {
			continue
		}
		h := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for _, call := range []struct {
			user string
			want int
		}{{"alice", tt.alice}, {"mallory", tt.stranger}} {
			r := post(goodKey, nil)
			r.Header.Set("X-User", call.user)
			if rec := send(h, r); rec.Code != call.want {
				t.Errorf("%s: %s got %d %s, want %d", name, call.user, rec.Code, rec.Body, call.want)
			}
		}
	}
}

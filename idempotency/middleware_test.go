package idempotency_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

func TestBadKeysReachNothing(t *testing.T) {
	t.Parallel()
	store := &faulty{Store: idempotencytest.NewStore(), begin: func() error {
		t.Error("store was asked")
		return nil
	}}
	h := protect(t, store, idempotency.MiddlewareConfig{}, unreached(t))
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch} {
		wantCode(t, method, send(h, httptest.NewRequest(method, "/", nil)), 400, "IDEMPOTENCY_KEY_REQUIRED")
	}
	for name, header := range malformed {
		wantCode(t, name, send(h, post(header, nil)), 400, "IDEMPOTENCY_KEY_INVALID")
	}
	twice := post(goodKey, nil)
	twice.Header.Add(idempotency.Header, goodKey)
	wantCode(t, "twice", send(h, twice), 400, "IDEMPOTENCY_KEY_INVALID")
}

func TestStoreDown(t *testing.T) {
	t.Parallel()
	h := protect(t, &faulty{begin: down}, idempotency.MiddlewareConfig{}, unreached(t))
	rec := send(h, post(goodKey, nil))
	wantCode(t, "down", rec, 503, "IDEMPOTENCY_STORE_UNAVAILABLE")
	if rec.Header().Get("Retry-After") == "" || strings.Contains(rec.Body.String(), errDown.Error()) {
		t.Errorf("headers %v, body %s", rec.Header(), rec.Body)
	}
}

func TestCompletionFailedKeepsTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		store := &faulty{Store: idempotencytest.NewStore(), complete: down}
		h := protect(t, store, idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
			runs++
			w.WriteHeader(http.StatusCreated)
		})
		if rec := send(h, post(goodKey, nil)); rec.Code != 201 {
			t.Errorf("first: %d; the client must get what was done", rec.Code)
		}
		rec := send(h, post(goodKey, nil))
		wantCode(t, "again", rec, 409, "IDEMPOTENCY_KEY_IN_USE")
		if rec.Header().Get("Retry-After") != "30" || runs != 1 {
			t.Errorf("Retry-After %q, %d runs", rec.Header().Get("Retry-After"), runs)
		}
		time.Sleep(29*time.Second + time.Millisecond)
		if rec := send(h, post(goodKey, nil)); rec.Header().Get("Retry-After") != "1" {
			t.Errorf("Retry-After %q; want what is left, rounded up", rec.Header().Get("Retry-After"))
		}
	})
}

func TestRequestBodyLimit(t *testing.T) {
	t.Parallel()
	read := ""
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxRequestBytes: 10},
		func(_ http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if read = string(body); err != nil {
				t.Error(err)
			}
		})
	chunked := func(body string) *http.Request {
		r := post(string(idempotency.NewKey()), struct{ io.Reader }{strings.NewReader(body)})
		r.ContentLength = -1
		return r
	}
	key := string(idempotency.NewKey())
	for what, r := range map[string]*http.Request{
		"declared": post(key, strings.NewReader(strings.Repeat("x", 11))),
		"chunked":  chunked(strings.Repeat("x", 11)),
		"endless":  post(key, io.MultiReader(strings.NewReader("x"), endless{})),
	} {
		wantCode(t, what, send(h, r), 413, "REQUEST_TOO_LARGE")
	}
	if read != "" {
		t.Errorf("handler read %q", read)
	}
	for _, body := range []string{"0123456789", ""} {
		if rec := send(h, chunked(body)); rec.Code != 200 || read != body {
			t.Errorf("%q: %d, handler read %q", body, rec.Code, read)
		}
	}
	if rec := send(h, post(key, strings.NewReader("short"))); rec.Code != 200 || read != "short" {
		t.Errorf("the key of a refused body: %d, handler read %q", rec.Code, read)
	}
	wantCode(t, "broken", send(h, post(key, broken{})), 400, "INVALID_REQUEST")
}

// A client declares the length, so it must not decide how much memory is allocated.
func TestDeclaredLengthTakesNoMemory(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxRequestBytes: math.MaxInt64},
		func(_ http.ResponseWriter, r *http.Request) {
			if body, err := io.ReadAll(r.Body); err != nil || string(body) != "short" {
				t.Errorf("handler read %q, %v", body, err)
			}
		})
	r := post(goodKey, strings.NewReader("short"))
	r.ContentLength = 1 << 60
	if rec := send(h, r); rec.Code != 200 {
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

// A record may hold a status that net/http does not accept.
func TestRecordsWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	for _, status := range []int{-1, 0, 99, 100, 101, 199, 1000} {
		store := idempotencytest.NewStore()
		h := protect(t, store, idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			if err := store.Complete(r.Context(), claim, driver.Response{Status: status}); err != nil {
				t.Error(err)
			}
		})
		send(h, post(goodKey, nil))
		wantCode(t, "status "+strconv.Itoa(status), send(h, post(goodKey, nil)), 409, "IDEMPOTENCY_RESULT_UNAVAILABLE")
	}
}

func TestScope(t *testing.T) {
	t.Parallel()
	runs := 0
	user := func(r *http.Request) (string, error) {
		if r.Header.Get("X-User") == "broken" {
			return "", errDown
		}
		return r.Header.Get("X-User"), nil
	}
	h := protectIn(t, user, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) { runs++ })
	for _, tt := range []struct {
		user   string
		status int
		runs   int
	}{{"ann", 200, 1}, {"bob", 200, 2}, {"ann", 200, 2}, {"", 500, 2}, {"broken", 500, 2}} {
		r := post(goodKey, nil)
		r.Header.Set("X-User", tt.user)
		if rec := send(h, r); rec.Code != tt.status || runs != tt.runs {
			t.Errorf("user %q: %d, %d runs; want %d, %d", tt.user, rec.Code, runs, tt.status, tt.runs)
		}
	}
}

func TestPanicAfterSettling(t *testing.T) {
	t.Parallel()
	runs := 0
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		runs++
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response{Status: 201},
		}, false)
		panic(http.ErrAbortHandler)
	})
	func() {
		defer func() {
			if got := recover(); got != http.ErrAbortHandler {
				t.Errorf("recovered %v", got)
			}
		}()
		send(h, post(goodKey, nil))
	}()
	if rec := send(h, post(goodKey, nil)); rec.Code != 201 || runs != 1 {
		t.Errorf("%d after %d runs; what was settled stays done", rec.Code, runs)
	}
}

// RequireKey and the middleware reject the same requests with the same answers.
func TestRequireKey(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		method, path string
		keys         []string
		refused      string
	}{
		{"POST", "/", nil, "IDEMPOTENCY_KEY_REQUIRED"},
		{"POST", "/", []string{goodKey}, ""},
		{"POST", "/", []string{`"` + goodKey + `"`}, ""},
		{"POST", "/", []string{"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}, "IDEMPOTENCY_KEY_INVALID"},
		{"POST", "/", []string{goodKey, goodKey}, "IDEMPOTENCY_KEY_INVALID"},
		{"GET", "/", nil, ""},
		{"GET", "/", []string{"malformed"}, ""},
		{"POST", "/optional", nil, ""},
		{"POST", "/optional", []string{"malformed"}, "IDEMPOTENCY_KEY_INVALID"},
	} {
		request := func() *http.Request {
			r := httptest.NewRequest(tt.method, tt.path, nil)
			r.Header[idempotency.Header] = tt.keys
			if tt.keys == nil {
				delete(r.Header, idempotency.Header)
			}
			return r
		}
		cfg := idempotency.MiddlewareConfig{Optional: tt.path == "/optional"}
		passed := 0
		charged := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed++ })
		before := send(idempotency.RequireKey(cfg)(charged), request())
		if (passed == 0) != (tt.refused != "") {
			t.Errorf("%+v: passed %d times", tt, passed)
		}
		if tt.refused != "" {
			wantCode(t, "before", before, 400, tt.refused)
		}
		within := send(protect(t, idempotencytest.NewStore(), cfg, charged), request())
		if before.Code != within.Code || before.Body.String() != within.Body.String() {
			t.Errorf("%+v: RequireKey answers %d %s, the middleware %d %s", tt, before.Code, before.Body, within.Code, within.Body)
		}
	}
	byDefault := idempotency.RequireKey(idempotency.MiddlewareConfig{})(unreached(t))
	wantCode(t, "by default", send(byDefault, httptest.NewRequest(http.MethodPut, "/", nil)), 400, "IDEMPOTENCY_KEY_REQUIRED")
}

// A body limit around the middleware counts as a limit, not as an incomplete body.
func TestBodyLimitAround(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, unreached(t))
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 10)
		h.ServeHTTP(w, r)
	})
	wantCode(t, "limited", send(outer, post(goodKey, strings.NewReader(strings.Repeat("x", 11)))), 413, "REQUEST_TOO_LARGE")
}

// The scope function and FingerprintParts may read the body, as FormValue does. It still counts in the fingerprint,
// and the handler still gets it.
func TestFunctionsThatReadTheBody(t *testing.T) {
	t.Parallel()
	read := func(r *http.Request) string {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		return string(body)
	}
	parts := func(r *http.Request) []string { return []string{read(r)[:4]} }
	scope := func(r *http.Request) (string, error) { return "user " + read(r)[:4], nil }
	for name, reads := range map[string]struct {
		scope func(*http.Request) (string, error)
		parts func(*http.Request) []string
	}{"scope": {scope, nil}, "FingerprintParts": {idempotency.GlobalScope, parts}} {
		cfg := idempotency.MiddlewareConfig{FingerprintParts: reads.parts}
		h := protectIn(t, reads.scope, idempotencytest.NewStore(), cfg, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, read(r)) })
		if rec := send(h, post(goodKey, strings.NewReader("ann pays 1"))); rec.Code != 200 || rec.Body.String() != "ann pays 1" {
			t.Errorf("%s: %d, handler read %q", name, rec.Code, rec.Body)
		}
		wantCode(t, name, send(h, post(goodKey, strings.NewReader("ann pays 2"))), 422, "IDEMPOTENCY_KEY_REUSED")
	}
}

// Errors that reach a client have a code and an HTTP status.
func TestCodes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err    error
		code   string
		status int
		waits  bool
	}{
		{idempotency.ErrKeyInvalid, "IDEMPOTENCY_KEY_INVALID", http.StatusBadRequest, false},
		{idempotency.ErrKeyInUse, "IDEMPOTENCY_KEY_IN_USE", http.StatusConflict, true},
		{idempotency.ErrKeyReused, "IDEMPOTENCY_KEY_REUSED", http.StatusUnprocessableEntity, false},
		{idempotency.ErrResultUnavailable, "IDEMPOTENCY_RESULT_UNAVAILABLE", http.StatusConflict, false},
		{idempotency.ErrStoreUnavailable, "IDEMPOTENCY_STORE_UNAVAILABLE", http.StatusServiceUnavailable, true},
		{idempotency.ErrLeaseLost, "IDEMPOTENCY_STORE_UNAVAILABLE", http.StatusServiceUnavailable, true},
		{idempotencypgx.ErrNotCommitted, "NOT_COMMITTED", http.StatusServiceUnavailable, true},
	} {
		err := fmt.Errorf("wrapped: %w", tt.err)
		coded, ok := errors.AsType[interface {
			error
			Code() string
			HTTPStatus() int
			RetryAfter() time.Duration
		}](err)
		if !ok || coded.Code() != tt.code || coded.HTTPStatus() != tt.status || (coded.RetryAfter() > 0) != tt.waits {
			t.Errorf("%v: want %d %s, and to wait is %v", tt.err, tt.status, tt.code, tt.waits)
		}
		if !errors.Is(err, tt.err) {
			t.Errorf("%v is not itself", tt.err)
		}
	}
	for _, err := range []error{idempotency.ErrNotStored, idempotency.ErrNoClaim} { // no client sees them
		if _, ok := errors.AsType[interface {
			error
			Code() string
		}](err); ok {
			t.Errorf("%v has a code", err)
		}
	}
}

// An outage costs one log line in ten seconds for each kind of fault, not one for every request.
func TestLogOfAnOutage(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		store driver.Store
		cfg   idempotency.MiddlewareConfig
		want  []string
	}{
		"begin": {&faulty{begin: down}, idempotency.MiddlewareConfig{}, []string{"store is unavailable"}},
		"fallback": {
			twoTiers{&faulty{begin: down}, &faulty{begin: down}},
			idempotency.MiddlewareConfig{},
			[]string{"store is unavailable", "fallback is unavailable"},
		},
		"complete": {&faulty{Store: idempotencytest.NewStore(), complete: down}, idempotency.MiddlewareConfig{}, []string{"result could not be stored"}},
		"scope": {
			idempotencytest.NewStore(),
			idempotency.MiddlewareConfig{},
			[]string{"scope failed"},
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			cfg := tt.cfg
			cfg.Logger = slog.New(slog.NewTextHandler(&out, nil))
			scope := idempotency.UnsafeGlobalScope
			if name == "scope" {
				scope = func(*http.Request) (string, error) { return "", errors.New("no user") }
			}
			protect, err := idempotency.NewMiddleware(tt.store, scope, cfg)
			must(t, err)
			h := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			start := time.Now()
			requests := 0
			for ; time.Since(start) <= 10*time.Second; time.Sleep(100 * time.Millisecond) {
				send(h, post(string(idempotency.NewKey()), nil))
				requests++
			}
			for _, want := range tt.want {
				if n := strings.Count(out.String(), `msg="idempotency: `+want); n < 1 || n > 2 {
					t.Errorf("%s: %d lines of %q for %d requests:\n%s", name, n, want, requests, out.String())
				}
			}
			if n := strings.Count(out.String(), "\n"); n > 2*len(tt.want) || !strings.Contains(out.String(), "repeats=") {
				t.Errorf("%s: %d lines:\n%s", name, n, out.String())
			}
		})
	}
}

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
		"rejected: store unavailable": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.MarkUnavailable()
			w.WriteHeader(503)
		}, 2, map[string]int64{"store_unavailable": 2}},
		"store unavailable, handler answers 2xx": {memory(), func(w http.ResponseWriter, r *http.Request) {
			claim, _ := driver.ClaimFrom(r.Context())
			claim.MarkUnavailable()
			w.WriteHeader(409)
		}, 2, map[string]int64{"completed": 1, "replayed": 1}},
		"store unavailable, second try works": {memory(), func(w http.ResponseWriter, r *http.Request) {
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

// A panic in a function of the service is counted with a result, too.
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

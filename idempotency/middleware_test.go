package idempotency_test

import (
	"errors"
	"io"
	"log/slog"
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
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func protect(t *testing.T, store driver.Store, cfg idempotency.MiddlewareConfig, fn http.HandlerFunc) http.Handler {
	t.Helper()
	return protectIn(t, idempotency.UnsafeGlobalScope, store, cfg, fn)
}

func protectIn(t *testing.T, scope func(*http.Request) (string, error), store driver.Store, cfg idempotency.MiddlewareConfig, fn http.HandlerFunc) http.Handler {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	middleware, err := idempotency.NewMiddleware(store, scope, cfg)
	must(t, err)
	return middleware(fn)
}

func send(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	return rec
}

func post(key string, body io.Reader) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/", body)
	r.Header.Set(idempotency.Header, key)
	return r
}

func wantCode(t *testing.T, what string, rec *httptest.ResponseRecorder, status int, code string) {
	t.Helper()
	if rec.Code != status || !strings.Contains(rec.Body.String(), `"code":"`+code+`"`) {
		t.Errorf("%s: %d %s; want %d %s", what, rec.Code, rec.Body, status, code)
	}
}

func unreached(t *testing.T) http.HandlerFunc {
	t.Helper()
	return func(_ http.ResponseWriter, r *http.Request) { t.Errorf("handler ran: %s %v", r.Method, r.Header) }
}

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

// A declared length is a claim of the client: it must not decide how much
// memory is taken.
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

// A record may hold a status that net/http would not take for an answer.
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

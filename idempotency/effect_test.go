package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// After MarkEffect no way to end frees the key.
func TestMarkEffect(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		end    func(w http.ResponseWriter)
		status int // of a repetition
		code   string
	}{
		"503":               {func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) }, 503, ""},
		"429":               {func(w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) }, 429, ""},
		"201":               {func(w http.ResponseWriter) { w.WriteHeader(http.StatusCreated) }, 201, ""},
		"panic":             {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE"},
		"503, streamed":     {streamed(http.StatusServiceUnavailable), 409, "IDEMPOTENCY_RESULT_UNAVAILABLE"},
		"503, too large":    {func(w http.ResponseWriter) { w.WriteHeader(503); _, _ = w.Write(make([]byte, 200)) }, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE"},
		"503, long headers": {func(w http.ResponseWriter) { w.Header().Set("Link", longText(200)); w.WriteHeader(503) }, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE"},
	} {
		runs := 0
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxResponseBytes: 100},
			func(w http.ResponseWriter, r *http.Request) {
				runs++
				idempotency.MarkEffect(r.Context())
				tt.end(w)
			})
		sendRecovering(h, post(goodKey, nil))
		for range 2 {
			rec := send(h, post(goodKey, nil))
			if rec.Code != tt.status || runs != 1 {
				t.Errorf("%s: again %d after %d runs; want %d after one", name, rec.Code, runs, tt.status)
			}
			if tt.code != "" {
				wantCode(t, name, rec, tt.status, tt.code)
			}
		}
	}
	idempotency.MarkEffect(t.Context()) // no claim, no harm
}

func longText(n int) string { return fmt.Sprintf("%0*d", n, 0) }

func streamed(status int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.WriteHeader(status)
		_ = http.NewResponseController(w).Flush()
	}
}

func sendRecovering(h http.Handler, r *http.Request) {
	defer func() { _ = recover() }()
	send(h, r)
}

// A mark that comes after the first byte still counts.
func TestMarkEffectWhileStreaming(t *testing.T) {
	t.Parallel()
	runs := 0
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		runs++
		streamed(http.StatusServiceUnavailable)(w)
		if runs == 2 {
			idempotency.MarkEffect(r.Context())
		}
	})
	for _, want := range []int{503, 503, 409, 409} {
		if rec := send(h, post(goodKey, nil)); rec.Code != want {
			t.Errorf("%d, want %d", rec.Code, want)
		}
	}
}

func TestDoMarkEffect(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func() error{
		"error": func() error { return io.ErrUnexpectedEOF },
		"panic": func() error { panic("boom") },
	} {
		store, runs := idempotencytest.NewStore(), 0
		do := func() (err error) {
			defer func() { _ = recover() }()
			_, _, err = idempotency.Do(t.Context(), store, goodKey, fp, func(ctx context.Context) (int, error) {
				runs++
				idempotency.MarkEffect(ctx)
				return 0, fail()
			})
			return err
		}
		if err := do(); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", name, err)
		}
		if err := do(); !errors.Is(err, idempotency.ErrResultUnavailable) || runs != 1 {
			t.Errorf("%s: again %v after %d runs", name, err, runs)
		}
	}
}

// Whoever cannot take back what was done must hear that nothing remembers it.
func TestDoMarkEffectNotStored(t *testing.T) {
	t.Parallel()
	_, _, err := idempotency.Do(t.Context(), &faulty{Store: idempotencytest.NewStore(), complete: down}, goodKey, fp, func(ctx context.Context) (int, error) {
		idempotency.MarkEffect(ctx)
		return 0, io.ErrUnexpectedEOF
	})
	if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.Is(err, idempotency.ErrNotStored) {
		t.Errorf("Do = %v; want the error and ErrNotStored", err)
	}
}

func TestChildKey(t *testing.T) {
	t.Parallel()
	child := func(key idempotency.Key, name string) (child idempotency.Key) {
		_, _, err := idempotency.Do(t.Context(), idempotencytest.NewStore(), key, fp, func(ctx context.Context) (_ int, err error) {
			child, err = idempotency.ChildKey(ctx, name)
			return 0, err
		})
		if err != nil {
			t.Error(err)
		}
		return child
	}
	payment := child(goodKey, "payment")
	if parsed, err := idempotency.ParseKey(string(payment)); err != nil || parsed != payment {
		t.Errorf("ChildKey = %q, %v; want a key", payment, err)
	}
	if again := child(goodKey, "payment"); again != payment {
		t.Errorf("another run has %q, want %q", again, payment)
	}
	seen := map[idempotency.Key]bool{goodKey: true}
	for _, k := range []idempotency.Key{goodKey, payment, idempotency.Key(goodKey).In("a"), idempotency.Key(goodKey).In("b")} {
		for _, name := range []string{"", "payment", "mail"} {
			if c := child(k, name); seen[c] {
				t.Errorf("%q of %q is not its own", name, k)
			} else {
				seen[c] = true
			}
		}
	}
	if payment != "fc55c3aa4d704795bb18cb095f7b51e4" { // it may be stored elsewhere: it must not change from version to version
		t.Errorf("ChildKey = %q", payment)
	}
	if _, err := idempotency.ChildKey(t.Context(), "payment"); !errors.Is(err, idempotency.ErrNoClaim) {
		t.Errorf("without a claim: %v", err)
	}
}

func TestDoKeepsAResponseAsItIs(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewStore()
	own := idempotency.Response{Status: 201, Header: http.Header{"Location": {"/1"}}, Body: []byte("one")}
	for i := range 2 {
		got, replayed, err := idempotency.Do(t.Context(), store, goodKey, fp, func(context.Context) (idempotency.Response, error) { return own, nil })
		if err != nil || replayed != (i > 0) || got.Status != 201 || string(got.Body) != "one" || got.Header.Get("Location") != "/1" {
			t.Errorf("call %d: %+v, %v, %v", i, got, replayed, err)
		}
		own.Body[0], own.Header["Location"][0] = 'x', "/x"
	}
}

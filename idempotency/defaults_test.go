package idempotency_test

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

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

// final says which statuses are kept by default.
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

// The lease is renewed when a third of it is over, and again after each third.
func TestRenewals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var renewed []time.Duration
		start := time.Now()
		store := &faulty{Store: idempotencytest.NewStore(), extend: func() error {
			renewed = append(renewed, time.Since(start))
			return nil
		}}
		h := protect(t, store, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) { time.Sleep(35 * time.Second) })
		if send(h, post(goodKey, nil)); len(renewed) != 3 || renewed[0] != 10*time.Second || renewed[2] != 30*time.Second {
			t.Errorf("renewed after %v", renewed)
		}
	})
}

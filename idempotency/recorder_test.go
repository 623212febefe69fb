package idempotency_test

import (
	"bufio"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// The first answer is the one that the handler would give by itself.
func TestFirstAnswerIsTheHandlersOwn(t *testing.T) {
	t.Parallel()
	for name, fn := range map[string]http.HandlerFunc{
		"nothing": func(http.ResponseWriter, *http.Request) {},
		"headers after the status": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			w.Header().Set("X-Late", "1")
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, "{}")
		},
		"headers after the body": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>")
			w.Header().Set("X-Late", "1")
		},
		"trailers":          trailers(false),
		"trailers, flushed": trailers(true),
	} {
		want := overWire(t, fn)
		got := overWire(t, protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, fn))
		if got != want {
			t.Errorf("%s:\n%s\nwithout the middleware:\n%s", name, got, want)
		}
	}
}

func trailers(flush bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		_, _ = io.WriteString(w, "body")
		if flush {
			_ = http.NewResponseController(w).Flush()
		}
		w.Header().Set("X-Sum", "1")
		w.Header().Set(http.TrailerPrefix+"X-More", "2")
	}
}

// overWire returns what a client gets of h, in one text.
func overWire(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, nil)
	must(t, err)
	r.Header.Set(idempotency.Header, goodKey)
	res, err := server.Client().Do(r)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	res.Header.Del("Date")
	text := res.Status + "\n"
	for _, h := range []http.Header{res.Header, res.Trailer} {
		for _, name := range slices.Sorted(maps.Keys(h)) {
			text += name + ": " + strings.Join(h[name], ", ") + "\n"
		}
		text += "\n"
	}
	return text + string(body)
}

func TestInvalidStatusPanics(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(42)
	})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	send(h, post(goodKey, nil))
}

func TestHijackLeavesATombstone(t *testing.T) {
	t.Parallel()
	runs := 0
	server := httptest.NewServer(protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{},
		func(w http.ResponseWriter, _ *http.Request) {
			runs++
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Errorf("Hijack: %v", err)
				return
			}
			_, _ = io.WriteString(conn, "HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			_ = conn.Close()
		}))
	defer server.Close()
	for _, want := range []string{"201", "409", "409"} {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		must(t, err)
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: "+goodKey+"\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.Contains(line, want) {
			t.Errorf("answer %q, %v; want %s", line, err, want)
		}
		_ = conn.Close()
	}
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
}

// What stands around the handler sees and sets the same header.
func TestHeadersAround(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Vary", "Accept")
		w.Header().Del("X-Outer")
		w.Header().Set("Location", "/1")
		w.WriteHeader(http.StatusCreated)
	})
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Origin")
		w.Header().Set("X-Outer", "1")
		h.ServeHTTP(w, r)
	})
	first := send(outer, post(goodKey, nil)).Header()
	if got := first.Values("Vary"); len(got) != 2 || got[0] != "Origin" || first.Get("X-Outer") != "" {
		t.Errorf("first: %v", first)
	}
	again := send(outer, post(goodKey, nil)).Header()
	if again.Get("Vary") != "Origin" || again.Get("X-Outer") != "1" || again.Get("Location") != "/1" {
		t.Errorf("again: %v", again)
	}
}

// A replay that is found out by the handler itself carries nothing of the handler's.
func TestHeadersOfADiscardedRun(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("X-Outer", "2")
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response{Status: 201},
		}, true)
		w.WriteHeader(http.StatusConflict)
	})
	rec := httptest.NewRecorder()
	rec.Header().Set("X-Outer", "1")
	h.ServeHTTP(rec, post(goodKey, nil))
	if got := rec.Header(); rec.Code != 201 || got.Get("Set-Cookie") != "" || got.Get("X-Outer") != "1" {
		t.Errorf("%d %v", rec.Code, got)
	}
}

// Each answer has a date of its own, and a kept one no more than that.
func TestDateIsFresh(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
	}))
	defer server.Close()
	for _, want := range []int{1970, time.Now().UTC().Year()} {
		r := post(goodKey, nil)
		r.RequestURI = ""
		r.URL.Scheme, r.URL.Host = "http", server.Listener.Addr().String()
		res, err := server.Client().Do(r)
		must(t, err)
		_ = res.Body.Close()
		if date, err := http.ParseTime(res.Header.Get("Date")); err != nil || date.Year() != want && date.Year() != want+1 {
			t.Errorf("Date is %q; want one of %d", res.Header.Get("Date"), want)
		}
	}
}

// mute is a writer that can only write.
type mute struct{ http.ResponseWriter }

// Where nothing can be flushed nothing is streamed, so the response is kept.
func TestFlushWithoutAFlusher(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "part")
		if err := http.NewResponseController(w).Flush(); !errors.Is(err, http.ErrNotSupported) {
			t.Errorf("Flush = %v; want ErrNotSupported", err)
		}
		_, _ = io.WriteString(w, "s")
	})
	for _, replayed := range []string{"", "true"} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(mute{rec}, post(goodKey, nil))
		if rec.Code != 200 || rec.Body.String() != "parts" || rec.Header().Get(idempotency.ReplayedHeader) != replayed {
			t.Errorf("%d %q %v", rec.Code, rec.Body, rec.Header())
		}
	}
}

func TestControlsOfTheConnection(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		if err := errors.Join(c.SetReadDeadline(time.Now().Add(time.Minute)), c.SetWriteDeadline(time.Now().Add(time.Minute)), c.EnableFullDuplex()); err != nil {
			t.Error(err)
		}
	})
	if got := overWire(t, h); !strings.HasPrefix(got, "200 OK") {
		t.Error(got)
	}
}

func TestWriterRefusesWhatItCannotDo(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		_, _, hijack := c.Hijack()
		for what, err := range map[string]error{
			"SetWriteDeadline": c.SetWriteDeadline(time.Time{}), "SetReadDeadline": c.SetReadDeadline(time.Time{}),
			"EnableFullDuplex": c.EnableFullDuplex(), "Hijack": hijack,
		} {
			if !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("%s = %v", what, err)
			}
		}
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusNoContent)
		if _, err := io.WriteString(w, "body"); !errors.Is(err, http.ErrBodyNotAllowed) {
			t.Errorf("Write after 204 = %v", err)
		}
	})
	for range 2 {
		if rec := send(h, post(goodKey, nil)); rec.Code != 204 || rec.Body.Len() != 0 {
			t.Errorf("%d %q", rec.Code, rec.Body)
		}
	}
}

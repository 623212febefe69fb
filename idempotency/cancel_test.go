package idempotency_test

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// A handler whose context has ended, and that wrote nothing, has not answered: the key is free, and a
// client that is still there gets 503. What it meant is kept else.
func TestSilentHandler(t *testing.T) {
	t.Parallel()
	waits := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	lost := func() error { return idempotency.ErrLeaseLost }
	for name, tt := range map[string]struct {
		handler  http.HandlerFunc
		deadline time.Duration // of the request's context
		extend   func() error
		status   int
		again    int // runs after a repetition
		counted  string
	}{
		"deadline": {waits, time.Second, nil, 503, 2, "released"},
		"deadline, with an effect": {func(w http.ResponseWriter, r *http.Request) {
			idempotency.MarkEffect(r.Context())
			waits(w, r)
		}, time.Second, nil, 200, 1, "completed"},
		"deadline, with an answer": {func(w http.ResponseWriter, r *http.Request) {
			waits(w, r)
			w.WriteHeader(http.StatusNoContent)
		}, time.Second, nil, 204, 1, "completed"},
		"within the deadline": {func(http.ResponseWriter, *http.Request) {}, time.Second, nil, 200, 1, "completed"},
		"lost lease":          {waits, 0, lost, 503, 2, "lease_lost"},
		"lost lease, with a deadline": {func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			if cause := context.Cause(r.Context()); !errors.Is(cause, idempotency.ErrLeaseLost) {
				t.Errorf("cause %v", cause)
			}
		}, time.Minute, lost, 503, 2, "lease_lost"},
	} {
		synctest.Test(t, func(t *testing.T) {
			runs := 0
			store := &faulty{Store: idempotencytest.NewStore(), extend: tt.extend}
			if tt.extend != nil {
				store.release = lost
			}
			var metrics metrictest.Recorder
			h := protect(t, store, idempotency.MiddlewareConfig{MeterProvider: &metrics}, func(w http.ResponseWriter, r *http.Request) {
				if runs++; runs > 1 {
					return
				}
				w.Header().Set("Location", "/nowhere")
				tt.handler(w, r)
			})
			r := post(goodKey, nil)
			if tt.deadline > 0 {
				ctx, cancel := context.WithTimeout(r.Context(), tt.deadline)
				defer cancel()
				r = r.WithContext(ctx)
			}
			rec := send(h, r)
			refused := strings.Contains(rec.Body.String(), `"code":"IDEMPOTENCY_STORE_UNAVAILABLE"`)
			if rec.Code != tt.status || refused != (tt.status == 503) || refused && rec.Header().Get("Location") != "" {
				t.Errorf("%s: %d %v %s; want %d", name, rec.Code, rec.Header(), rec.Body, tt.status)
			}
			if got := counted(&metrics); !maps.Equal(got, map[string]int64{tt.counted: 1}) {
				t.Errorf("%s: counted %v, want %s", name, got, tt.counted)
			}
			time.Sleep(time.Minute) // what was lost is another's for a while
			if send(h, post(goodKey, nil)); runs != tt.again {
				t.Errorf("%s: %d runs, want %d", name, runs, tt.again)
			}
		})
	}
}

// Whoever hangs up cancels nothing, not even a handler that would return without an answer then.
func TestClientHangsUp(t *testing.T) {
	t.Parallel()
	entered, hungUp := make(chan struct{}), make(chan struct{})
	runs := 0
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		runs++
		close(entered)
		<-hungUp
		if r.Context().Err() == nil && r.Context().Value(http.ServerContextKey) != nil {
			w.WriteHeader(http.StatusCreated)
		}
	})
	done := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(done)
		go func() {
			<-r.Context().Done()
			close(hungUp)
		}()
		h.ServeHTTP(w, r)
	}))
	defer server.Close()
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, http.NoBody)
	must(t, err)
	r.Header.Set(idempotency.Header, goodKey)
	go func() {
		<-entered
		hangUp()
	}()
	if resp, err := server.Client().Do(r); err == nil {
		resp.Body.Close()
		t.Errorf("answered with %d", resp.StatusCode)
	}
	<-done
	if rec := send(h, post(goodKey, nil)); rec.Code != 201 || rec.Header().Get(idempotency.ReplayedHeader) == "" || runs != 1 {
		t.Errorf("repetition: %d %v, %d runs", rec.Code, rec.Header(), runs)
	}
}

// http.TimeoutHandler around the middleware bounds the work: its deadline stays.
func TestTimeoutHandlerAround(t *testing.T) {
	t.Parallel()
	ended, returned := make(chan error, 1), make(chan struct{})
	runs := 0
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		if runs++; runs > 1 {
			return
		}
		<-r.Context().Done()
		ended <- r.Context().Err()
	})
	around := http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r)
		close(returned)
	}), 10*time.Millisecond, "")
	if rec := send(around, post(goodKey, nil)); rec.Code != 503 {
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ended with %v", err)
	}
	<-returned
	if rec := send(h, post(goodKey, nil)); rec.Code != 200 || runs != 2 {
		t.Errorf("repetition: %d, %d runs", rec.Code, runs)
	}
}

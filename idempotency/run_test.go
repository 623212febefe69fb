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
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// late takes the key, and answers Begin when nobody waits for it any more.
type late struct{ *idempotencytest.Store }

func (l late) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	_, _ = l.Store.Begin(ctx, c)
	<-ctx.Done()
	return driver.BeginResult{}, ctx.Err()
}

// An error that passes does not cost the result of a run.
func TestCompletionIsTriedAgain(t *testing.T) {
	t.Parallel()
	for what, failures := range map[string]int{"once": 1, "for a while": 5} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			store := &faulty{Store: idempotencytest.NewStore(), complete: func() error {
				if asked++; asked <= failures {
					return errDown
				}
				return nil
			}}
			h := protect(t, store, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
			for _, replayed := range []string{"", "true"} {
				if rec := send(h, post(goodKey, nil)); rec.Code != 200 || rec.Header().Get(idempotency.ReplayedHeader) != replayed {
					t.Errorf("%s: %d %v", what, rec.Code, rec.Header())
				}
			}
		})
	}
}

// What a caller who has given up may have begun is not left to its lease.
func TestAbandonedBeginFreesTheKey(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(store driver.Store){
		"timeout": func(store driver.Store) {
			send(protect(t, store, idempotency.MiddlewareConfig{}, unreached(t)), post(goodKey, nil))
		},
		"cancelled": func(store driver.Store) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, _, err := idempotency.Do(ctx, store, goodKey, fp, func(context.Context) (int, error) { return 0, nil })
			if err == nil {
				t.Error("no error")
			}
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			memory := idempotencytest.NewStore()
			ask(late{memory})
			synctest.Wait()
			h := protect(t, memory, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
			if rec := send(h, post(goodKey, nil)); rec.Code != 200 {
				t.Errorf("%s: the next request gets %d %s", name, rec.Code, rec.Body)
			}
		})
	}
}

type valueKey struct{}

// The context of the work is made of parts of our own: it must not differ from
// one of the standard library.
func TestContextOfTheWork(t *testing.T) {
	t.Parallel()
	end := errors.New("client gone")
	for name, tt := range map[string]struct {
		work  func(ctx context.Context, hangUp func()) // waits for the context, or does not
		cause error
	}{
		"nobody waits": {func(context.Context, func()) {}, context.Canceled},
		"hung up before anybody waits": {func(ctx context.Context, hangUp func()) {
			hangUp()
			if ctx.Err() == nil || !errors.Is(context.Cause(ctx), end) {
				t.Errorf("Err %v, cause %v", ctx.Err(), context.Cause(ctx))
			}
			<-ctx.Done()
		}, end},
		"hung up while a child waits": {func(ctx context.Context, hangUp func()) {
			child, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			go hangUp()
			if <-child.Done(); !errors.Is(context.Cause(child), end) {
				t.Errorf("cause %v", context.Cause(child))
			}
		}, end},
		"AfterFunc": {func(ctx context.Context, hangUp func()) {
			called := make(chan struct{})
			context.AfterFunc(ctx, func() { close(called) })
			hangUp()
			<-called
		}, end},
		"deadline": {func(ctx context.Context, _ func()) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) != time.Minute {
				t.Errorf("deadline %v, %v", d, ok)
			}
			if _ = ctx.Done(); ctx.Err() != nil {
				t.Errorf("Err %v", ctx.Err())
			}
			if d, ok := ctx.Deadline(); !ok || time.Until(d) != time.Minute {
				t.Errorf("deadline %v, %v", d, ok)
			}
			<-ctx.Done()
		}, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			parent, cancel := context.WithTimeout(context.WithValue(context.Background(), valueKey{}, "v"), time.Minute)
			defer cancel()
			parent, hangUp := context.WithCancelCause(parent)
			var left []context.Context
			_, _, err := idempotency.Do(parent, idempotencytest.NewStore(), goodKey, fp, func(ctx context.Context) (int, error) {
				left = append(left, ctx)
				tt.work(ctx, func() { hangUp(end) })
				for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
					if claim, ok := driver.ClaimFrom(ctx); !ok || claim.Key != goodKey || ctx.Value(valueKey{}) != "v" {
						t.Errorf("%s: claim %v, value %v", name, claim, ctx.Value(valueKey{}))
					}
				}
				return 1, nil
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			// What the work has left behind ends with it.
			select {
			case <-left[0].Done():
			default:
				t.Errorf("%s: the context outlives the work", name)
			}
			if cause := context.Cause(left[0]); left[0].Err() == nil || !errors.Is(cause, tt.cause) {
				t.Errorf("%s: Err %v, cause %v; want %v", name, left[0].Err(), cause, tt.cause)
			}
		})
	}
}

// A client that hangs up interrupts neither the begin nor the end of a claim.
func TestStoreIsNotInterruptedByTheClient(t *testing.T) {
	t.Parallel()
	ctx, hangUp := context.WithCancel(context.WithValue(t.Context(), valueKey{}, "v"))
	hangUp()
	calls := 0
	look := func(ctx context.Context) {
		calls++
		left, ok := ctx.Deadline()
		select {
		case <-ctx.Done():
			t.Error("interrupted")
		default:
		}
		again, _ := ctx.Deadline()
		if ctx.Err() != nil || !ok || !left.Equal(again) || time.Until(left) > 5*time.Second || ctx.Value(valueKey{}) != "v" {
			t.Errorf("Err %v, deadline %v, value %v", ctx.Err(), left, ctx.Value(valueKey{}))
		}
	}
	h := protect(t, looking{idempotencytest.NewStore(), look}, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
	send(h, post(goodKey, nil).WithContext(ctx))
	if calls != 2 {
		t.Errorf("%d calls", calls)
	}
}

type looking struct {
	driver.Store
	look func(context.Context)
}

func (l looking) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	l.look(ctx)
	return l.Store.Begin(ctx, c)
}

func (l looking) Complete(ctx context.Context, c driver.Claim, r driver.Response) error {
	l.look(ctx)
	return l.Store.Complete(ctx, c, r)
}

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

package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// late takes the key, but its Begin returns only after the caller has given up.
type late struct{ *idempotencytest.Store }

func (l late) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	_, _ = l.Store.Begin(ctx, c)
	<-ctx.Done()
	return driver.BeginResult{}, ctx.Err()
}

// A temporary error does not lose the result of a run.
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

// A claim that a given-up Begin may have made is freed before its lease ends.
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

// The work's context is our own implementation: it must not differ from a context of the standard library.
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
			// Contexts that the work has left behind end with it.
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

// A client that disconnects interrupts neither the begin nor the end of a claim.
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

// A handler whose context has ended before it wrote anything has not answered. The key is free, and a client that is
// still connected gets 503. In all other cases its response is kept.
func TestSilentHandler(t *testing.T) {
	t.Parallel()
	waits := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	lost := func() error { return idempotency.ErrLeaseLost }
	for name, tt := range map[string]struct {
		handler  http.HandlerFunc
		deadline time.Duration // of the request's context
		extend   func() error
		status   int
		again    int // runs after a repeated request
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
			time.Sleep(time.Minute) // the lost key is held by another run for a while
			if send(h, post(goodKey, nil)); runs != tt.again {
				t.Errorf("%s: %d runs, want %d", name, runs, tt.again)
			}
		})
	}
}

// A client that disconnects cancels nothing, not even a handler that would then return without an answer.
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

// http.TimeoutHandler around the middleware limits the work, because its deadline is kept.
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

// The lease is renewed after a third of it, and again after each further third.
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

type receipt struct {
	ID int `json:"id"`
}

func TestDo(t *testing.T) {
	t.Parallel()
	store, key, runs := idempotencytest.NewStore(), idempotency.NewKey(), 0
	charge := func(ctx context.Context) (receipt, error) {
		runs++
		if c, ok := driver.ClaimFrom(ctx); !ok || c.Key != driver.Key(key) {
			t.Errorf("claim %+v, %v", c, ok)
		}
		return receipt{ID: runs}, nil
	}
	for i := range 3 {
		got, replayed, err := idempotency.Do(t.Context(), store, key, fp, charge)
		if err != nil || got.ID != 1 || replayed != (i > 0) {
			t.Errorf("call %d: %+v, %v, %v", i, got, replayed, err)
		}
	}
	_, _, err := idempotency.Do(t.Context(), store, key, []string{"other"}, charge)
	if !errors.Is(err, idempotency.ErrKeyReused) {
		t.Errorf("other request: %v", err)
	}
	if _, _, err = idempotency.Do(t.Context(), store, "no key", fp, charge); !errors.Is(err, idempotency.ErrKeyInvalid) {
		t.Errorf("bad key: %v", err)
	}
	if _, _, err = idempotency.Do(t.Context(), nil, key, fp, charge); err == nil {
		t.Error("no store: no error")
	}
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
}

func TestDoFailureFreesTheKey(t *testing.T) {
	t.Parallel()
	store, key, declined := idempotencytest.NewStore(), idempotency.NewKey(), errors.New("declined")
	do := func(fn func() (receipt, error)) (receipt, bool, error) {
		return idempotency.Do(t.Context(), store, key, fp, func(context.Context) (receipt, error) { return fn() })
	}
	if _, _, err := do(func() (receipt, error) { return receipt{}, declined }); !errors.Is(err, declined) {
		t.Errorf("error %v", err)
	}
	func() {
		defer func() { _ = recover() }()
		_, _, _ = do(func() (receipt, error) { panic("boom") })
	}()
	if got, replayed, err := do(func() (receipt, error) { return receipt{7}, nil }); err != nil || replayed || got.ID != 7 {
		t.Errorf("after failures: %+v, %v, %v", got, replayed, err)
	}
}

// Only after the work does it show that JSON cannot encode the value.
func TestDoValueThatCannotBeKept(t *testing.T) {
	t.Parallel()
	store, key, runs := idempotencytest.NewStore(), idempotency.NewKey(), 0
	for i := range 2 {
		got, replayed, err := idempotency.Do(t.Context(), store, key, fp, func(context.Context) (float64, error) {
			runs++
			return math.Inf(1), nil
		})
		if !errors.Is(err, idempotency.ErrResultUnavailable) || replayed || math.IsInf(got, 1) != (i == 0) {
			t.Errorf("call %d: %v, %v, %v; want ErrResultUnavailable", i, got, replayed, err)
		}
	}
	if runs != 1 {
		t.Errorf("%d runs; the work was done twice", runs)
	}
}

func TestDoInUse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, key, leave := idempotencytest.NewStore(), idempotency.NewKey(), make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _, err := idempotency.Do(context.Background(), store, key, fp, func(context.Context) (int, error) {
				<-leave
				return 1, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
		time.Sleep(time.Minute) // the lease is renewed in the meantime
		_, _, err := idempotency.Do(t.Context(), store, key, fp, func(context.Context) (int, error) { return 2, nil })
		inUse, ok := errors.AsType[interface {
			error
			RetryAfter() time.Duration
		}](err)
		if !ok || !errors.Is(err, idempotency.ErrKeyInUse) || inUse.RetryAfter() <= 0 || inUse.RetryAfter() > 30*time.Second {
			t.Errorf("error %v", err)
		}
		close(leave)
		wg.Wait()
	})
}

func TestRenewalSurvivesAShortOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		store := &faulty{Store: idempotencytest.NewStore(), extend: func() error {
			if d := time.Since(start); d > 5*time.Second && d < 25*time.Second {
				return errDown
			}
			return nil
		}}
		_, _, err := idempotency.Do(t.Context(), store, idempotency.NewKey(), fp, func(ctx context.Context) (int, error) {
			select {
			case <-ctx.Done():
				return 0, context.Cause(ctx)
			case <-time.After(10 * time.Minute):
				return 1, nil
			}
		})
		if err != nil {
			t.Errorf("Do = %v", err)
		}
	})
}

// The lease begins when the store executes Begin, not when Begin was called.
func TestSlowBeginLosesNoLease(t *testing.T) {
	t.Parallel()
	for _, slow := range []time.Duration{5 * time.Second, 15 * time.Second, 25 * time.Second, 40 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var asked []time.Duration
			var begun time.Time
			store := &faulty{
				Store: idempotencytest.NewStore(),
				begin: func() error { time.Sleep(slow); begun = time.Now(); return nil },
				extend: func() error {
					asked = append(asked, time.Since(begun))
					return nil
				},
			}
			// The fake would reject a context that has ended in the meantime.
			_, _, err := idempotency.Do(t.Context(), patient{store}, idempotency.NewKey(), fp, func(ctx context.Context) (int, error) {
				select {
				case <-ctx.Done():
					return 0, context.Cause(ctx)
				case <-time.After(time.Minute):
					return 1, nil
				}
			})
			if first := max(0, (30*time.Second)/3-slow); err != nil || len(asked) == 0 || asked[0] != first {
				t.Errorf("Begin took %v: Do = %v, renewed after %v; want first after %v", slow, err, asked, first)
			}
		})
	}
}

// patient is a store whose Begin ignores the end of its context.
type patient struct{ driver.Store }

func (p patient) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	return p.Store.Begin(context.WithoutCancel(ctx), c)
}

func TestLongOutageLosesTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, start := &faulty{Store: idempotencytest.NewStore(), extend: down}, time.Now()
		_, _, err := idempotency.Do(t.Context(), store, idempotency.NewKey(), fp, func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, context.Cause(ctx)
		})
		if !errors.Is(err, idempotency.ErrLeaseLost) || time.Since(start) != (30*time.Second) {
			t.Errorf("Do = %v after %v; want ErrLeaseLost when the lease ends", err, time.Since(start))
		}
	})
}

func TestDoNotStored(t *testing.T) {
	t.Parallel()
	store := &faulty{Store: idempotencytest.NewStore(), complete: down}
	got, _, err := idempotency.Do(t.Context(), store, idempotency.NewKey(), fp, func(context.Context) (int, error) { return 7, nil })
	if got != 7 || !errors.Is(err, idempotency.ErrNotStored) || !errors.Is(err, errDown) {
		t.Errorf("Do = %v, %v; want the value and ErrNotStored", got, err)
	}
}

// After MarkEffect no end of the run frees the key.
func TestMarkEffect(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		end    func(w http.ResponseWriter)
		status int // of a repeated request
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

// A mark after the first byte still counts.
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

// Do must also return ErrNotStored if the record of a marked effect was not stored.
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
	if payment != "fc55c3aa4d704795bb18cb095f7b51e4" { // providers may have stored it, so it must not change between versions
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

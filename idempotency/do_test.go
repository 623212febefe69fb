package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

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

// What JSON cannot hold shows only when the work is done.
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
		time.Sleep(time.Minute) // it is renewed meanwhile
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

// The lease begins when the store gets to it, not when it was asked.
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
			// The fake would refuse a context that ended meanwhile.
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

// patient is a store whose Begin outlasts its context.
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

package idempotency_test

import (
	"context"
	"errors"
	"math"
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

var fp = []string{"charge", "42"}

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

// faulty is a store whose steps fail when told to.
type faulty struct {
	driver.Store
	begin, extend, complete, release func() error
}

func (f *faulty) fail(fn func() error) error {
	if fn == nil {
		return nil
	}
	return fn()
}

func (f *faulty) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	if err := f.fail(f.begin); err != nil {
		return driver.BeginResult{}, err
	}
	return f.Store.Begin(ctx, c)
}

func (f *faulty) Extend(ctx context.Context, c driver.Claim) error {
	if err := f.fail(f.extend); err != nil {
		return err
	}
	return f.Store.Extend(ctx, c)
}

func (f *faulty) Complete(ctx context.Context, c driver.Claim, r driver.Response) error {
	if err := f.fail(f.complete); err != nil {
		return err
	}
	return f.Store.Complete(ctx, c, r)
}

func (f *faulty) Release(ctx context.Context, c driver.Claim) error {
	if err := f.fail(f.release); err != nil {
		return err
	}
	return f.Store.Release(ctx, c)
}

var errDown = errors.New("store is down")

func down() error { return errDown }

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

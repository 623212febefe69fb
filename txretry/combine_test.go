package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/txretry"
)

// inLine tells by its Done that a call waits for its key.
type inLine struct {
	context.Context
	once  sync.Once
	there chan struct{}
}

func (c *inLine) Done() <-chan struct{} {
	c.once.Do(func() { close(c.there) })
	return c.Context.Done()
}

// combined has calls of these functions share a transaction, in this order, and returns their errors.
func combined(t *testing.T, m *txretry.Manager, fns ...func(ctx context.Context, tx pgx.Tx) error) []error {
	t.Helper()
	return combinedWith(t, m, func(int) txretry.Options { return txretry.Options{} }, fns...)
}

// combinedWith is combined with these options beside those that it sets.
func combinedWith(t *testing.T, m *txretry.Manager, options func(call int) txretry.Options, fns ...func(ctx context.Context, tx pgx.Tx) error) []error {
	t.Helper()
	errs := make([]error, len(fns))
	held, release := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		err := m.DoWith(t.Context(), txretry.Options{SerialKey: "k"}, func(context.Context, pgx.Tx) error {
			close(held)
			<-release
			return errHeld
		})
		if !errors.Is(err, errHeld) {
			t.Error(err)
		}
	})
	<-held
	for i, fn := range fns {
		ctx := &inLine{Context: t.Context(), there: make(chan struct{})}
		all.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					errs[i] = fmt.Errorf("panic: %v", v)
				}
			}()
			opts := options(i)
			opts.Name, opts.SerialKey, opts.Combine = string(rune('a'+i)), "k", 10
			errs[i] = m.DoWith(ctx, opts, fn)
		})
		<-ctx.there
	}
	close(release)
	all.Wait()
	return errs
}

var errHeld = errors.New("the key was held for the others to stand in line")

// What each of the calls leaves for COMMIT is run with the COMMIT that they share.
func TestCombinedAtCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	leave := func(n int) func(ctx context.Context, tx pgx.Tx) error {
		return func(_ context.Context, tx pgx.Tx) error {
			if !txretry.AtCommit(tx, addSQL, n) {
				t.Error("AtCommit refused")
			}
			return nil
		}
	}
	if err := errors.Join(combined(t, newManager(t, pool, txretry.Config{}), leave(1), leave(10), leave(100))...); err != nil {
		t.Error(err)
	}
	wantCounter(t, pool, 111)
}

// An attempt that fails for a transient reason is counted for each call: that of a fn for its own call, that
// of COMMIT for all that shared it.
func TestCombinedFailuresAreCounted(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	exec(t, pool, deferredFailure)
	once := func(fail func(ctx context.Context, tx pgx.Tx) error) func(ctx context.Context, tx pgx.Tx) error {
		failed := false
		return func(ctx context.Context, tx pgx.Tx) error {
			err := addOne(ctx, tx)
			if err == nil && !failed {
				failed, err = true, fail(ctx, tx)
			}
			return err
		}
	}
	atCommit := once(func(ctx context.Context, tx pgx.Tx) error { return failAtCommit(ctx, tx, "40001") })
	inFn := once(func(context.Context, pgx.Tx) error { return &pgconn.PgError{Code: "40P01"} })
	const commit, fn = "phase=commit,sqlstate=40001", "phase=fn,sqlstate=40P01"
	for name, tt := range map[string]struct {
		last func(ctx context.Context, tx pgx.Tx) error
		want [3]string // of each call
	}{
		"COMMIT": {atCommit, [3]string{commit, commit, commit}},
		"fn":     {inFn, [3]string{"", "", fn}},
	} {
		var metrics metrictest.Recorder
		m := newManager(t, pool, txretry.Config{MeterProvider: &metrics})
		if err := errors.Join(combined(t, m, addOne, addOne, tt.last)...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := map[string]float64{}
		for key, values := range metrics.Take() {
			if labels, ok := strings.CutPrefix(key, "holdfast.txretry.failures"); ok {
				got[labels] = values[0]
			}
		}
		want := map[string]float64{}
		for i, labels := range tt.want {
			if labels != "" {
				want[fmt.Sprintf("{operation=%c,%s}", 'a'+i, labels)] = 1
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: failures %v, want %v", name, got, want)
		}
	}
	wantCounter(t, pool, 6)
}

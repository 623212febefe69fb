package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

// The reply of a COMMIT that three calls share is dropped by the network, which then breaks and heals.
func TestCombinedCommitReplyLost(t *testing.T) {
	t.Parallel()
	for name, status := range map[string]bool{"resolved": true, "unknown": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newCounter(t)
			proxy := testenv.NewProxy(t, direct.Config().ConnString())
			m := newManager(t, pgtest.Pool(t, proxy.URL(), 2), txretry.Config{XactStatus: status, Logger: quiet})
			var network sync.WaitGroup
			lose := func(ctx context.Context, tx pgx.Tx) error {
				err := addOne(ctx, tx)
				proxy.DropReplies()
				network.Go(func() {
					for n := 0; n < 3 && t.Context().Err() == nil; {
						n, _ = read(t.Context(), direct)
					}
					proxy.Cut()
					proxy.Heal()
				})
				return err
			}
			errs := combined(t, m, addOne, addOne, lose)
			network.Wait()
			for i, err := range errs {
				unknown, is := errors.AsType[*txretry.CommitUnknownError](err)
				if is == status || (err == nil) != status || is && unknown.Name != string(rune('a'+i)) {
					t.Errorf("call %d: error %v", i, err)
				}
			}
			wantCounter(t, direct, 3)
		})
	}
}

// A fn that ends the transaction by a statement ends that of the others, too. What they have left for
// COMMIT is not done then, so that no answer of the server makes it a success.
func TestCombinedEndedByStatement(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ status, atCommit, unknown bool }{
		"resolved": {status: true},
		"unknown":  {unknown: true},
		"AtCommit": {status: true, atCommit: true, unknown: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			m := newManager(t, pool, txretry.Config{XactStatus: tt.status, Logger: quiet})
			add := func(ctx context.Context, tx pgx.Tx) error {
				if tt.atCommit {
					txretry.AtCommit(tx, "update counter set n = 100")
				}
				return addOne(ctx, tx)
			}
			errs := combined(t, m, add, add, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "commit")
				return err
			}, addOne)
			for i, err := range errs[:2] {
				unknown, is := errors.AsType[*txretry.CommitUnknownError](err)
				if is != tt.unknown || (err != nil) != tt.unknown || is && unknown.Name != string(rune('a'+i)) {
					t.Errorf("call %d: error %v", i, err)
				}
			}
			if !errors.Is(errs[2], txretry.ErrManaged) || errs[3] != nil {
				t.Errorf("errors %v, want ErrManaged and none", errs[2:])
			}
			wantCounter(t, pool, 3)
		})
	}
}

// A tracer that panics in COMMIT leaves no call waiting.
func TestCombinedPanicDuringCommit(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	cfg := direct.Config()
	cfg.ConnConfig.Tracer = faultyTracer{}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	errs := combined(t, newManager(t, pool, txretry.Config{}), addOne, addOne)
	if errs[0] == nil || errs[0].Error() != "panic: boom" {
		t.Errorf("the panic did not come out of the first Do: %v", errs[0])
	}
	if _, ok := errors.AsType[*txretry.CommitUnknownError](errs[1]); !ok {
		t.Errorf("error %v, want *CommitUnknownError", errs[1])
	}
	wantCounter(t, direct, 2)
}

// A call with AtBegin only shares a transaction that it begins.
func TestCombinedAtBegin(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	options := func(call int) (o txretry.Options) {
		if call == 1 {
			o.AtBegin.SQL = "update counter set n = n + 1 where id = 2"
		}
		return o
	}
	errs := combinedWith(t, newManager(t, pool, txretry.Config{}), options, addOne, func(ctx context.Context, tx pgx.Tx) error {
		var n int
		err := tx.QueryRow(ctx, "select n from counter where id = 2").Scan(&n)
		if n != 1 {
			t.Errorf("the counter of AtBegin is %d, want 1", n)
		}
		return err
	}, addOne)
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	wantCounter(t, pool, 2)
}

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

// A fn that ends the transaction by a statement and then panics has an unknown outcome, too.
func TestCombinedEndedThenPanics(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	var metrics metrictest.Recorder
	m := newManager(t, pool, txretry.Config{MeterProvider: &metrics})
	errs := combined(t, m, addOne, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "commit"); err != nil {
			return err
		}
		panic("boom")
	})
	if _, ok := errors.AsType[*txretry.CommitUnknownError](errs[0]); !ok || errs[1].Error() != "panic: boom" {
		t.Errorf("errors %v, want *CommitUnknownError and the panic", errs)
	}
	for _, call := range []string{"a", "b"} {
		if got := metrics.Values("holdfast.txretry.attempts{operation=" + call + ",outcome=unknown}"); len(got) != 1 {
			t.Errorf("call %s is not counted as unknown", call)
		}
	}
	wantCounter(t, pool, 1)
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

// The span of a call tells of its failed attempts in their order: here of one that it shared, then of one alone.
func TestCombinedFailuresAreInOrder(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	exec(t, pool, deferredFailure)
	var spans byCall
	m := newManager(t, pool, txretry.Config{TracerProvider: &spans})
	attempt := 0
	leader := func(ctx context.Context, tx pgx.Tx) error {
		attempt++
		switch attempt {
		case 1:
			return failAtCommit(ctx, tx, "40001")
		case 2:
			return &pgconn.PgError{Code: "40P01"}
		}
		return addOne(ctx, tx)
	}
	if err := errors.Join(combined(t, m, leader, addOne)...); err != nil {
		t.Fatal(err)
	}
	want := []string{"holdfast.phase=commit,holdfast.sqlstate=40001", "holdfast.phase=fn,holdfast.sqlstate=40P01"}
	if got := spans.eventsOf("a"); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

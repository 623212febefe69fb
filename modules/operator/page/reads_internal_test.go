package page

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// counted is a read that takes some time for each of ten results.
type counted struct {
	each  time.Duration
	began int // reads
	err   error
}

func (c *counted) find(ctx context.Context, soFar func(any)) (any, bool, error) {
	c.began++
	for n := range 10 {
		soFar(n)
		select {
		case <-time.After(c.each):
		case <-ctx.Done():
			return n, false, ctx.Err()
		}
	}
	return 10, true, c.err
}

// A request shows the results so far in time. Later requests share the read, and its results for a while.
func TestReads_continueAfterTheirRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads
		c := counted{each: time.Second}
		wants := func(what string, again bool, found any, running bool, reads int) {
			t.Helper()
			began := time.Now()
			s := r.results(t.Context(), "key", again, c.find)
			if time.Since(began) > patience || s.found != found || s.Running() != running || c.began != reads || s.err != nil {
				t.Errorf("%s: after %v %+v, %d reads; want %v and %d", what, time.Since(began), s, c.began, found, reads)
			}
		}
		wants("at once", false, 0, true, 1)
		time.Sleep(5 * time.Second)
		wants("later", false, 5, true, 1)
		time.Sleep(5 * time.Second)
		wants("at the end", false, 10, false, 1)
		time.Sleep(49 * time.Second)
		wants("kept", false, 10, false, 1)
		wants("again", true, 0, true, 2)
		time.Sleep(61 * time.Second)
		if s := r.results(t.Context(), "key", false, c.find); s.found != 0 || c.began != 3 {
			t.Errorf("old results: %+v, %d reads", s, c.began)
		}
		r.close()
	})
}

// Results that came at once are not kept, and failures for a short time only.
func TestReads_keepNoQuickResults(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads
		quick, failed := counted{}, counted{each: time.Second, err: errors.New("no")}
		for range 3 {
			if s := r.results(t.Context(), "quick", false, quick.find); s.found != 10 || !s.more || s.Running() {
				t.Errorf("quick: %+v", s)
			}
			r.results(t.Context(), "failed", false, failed.find)
			time.Sleep(11 * time.Second)
			if s := r.results(t.Context(), "failed", false, failed.find); !errors.Is(s.err, failed.err) {
				t.Errorf("failed: %+v", s)
			}
			time.Sleep(10 * time.Second)
		}
		if quick.began != 3 || failed.began != 3 {
			t.Errorf("%d and %d reads", quick.began, failed.began)
		}
	})
}

// A read ends when nobody requests its results, and when it is stopped. stop returns after the read has ended.
func TestReads_end(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads
		var ended atomic.Int32
		long := func(ctx context.Context, _ func(any)) (any, bool, error) {
			<-ctx.Done()
			time.Sleep(time.Second)
			ended.Add(1)
			return nil, false, ctx.Err()
		}
		r.results(t.Context(), "abandoned", false, long)
		time.Sleep(abandonAfter)
		r.results(t.Context(), "other", false, long)
		time.Sleep(2 * time.Second)
		if ended.Load() != 1 {
			t.Errorf("%d reads were abandoned, want 1", ended.Load())
		}
		if r.stop(); ended.Load() != 2 {
			t.Errorf("%d reads ended by stop, want 1", ended.Load()-1)
		}
		r.close()
		if s := r.results(t.Context(), "late", false, long); !errors.Is(s.err, errEnding) || s.Running() {
			t.Errorf("after close: %+v", s)
		}
	})
}

func TestReads_areBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads
		c := counted{each: time.Second}
		for n := range maxReads + 1 {
			if s := r.results(t.Context(), string(rune('a'+n)), false, c.find); (s.err != nil) != (n == maxReads) {
				t.Errorf("read %d: %+v", n, s)
			}
		}
		time.Sleep(20 * time.Second) // they give way to others as soon as they have ended
		if s := r.results(t.Context(), "next", false, c.find); s.err != nil {
			t.Error(s.err)
		}
		r.close()
	})
}

package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// entered starts a job and reports when it may run.
func entered(ctx context.Context, s *Solo, suspect bool) <-chan func() {
	in := make(chan func(), 1)
	go func() { in <- s.enter(ctx, suspect) }()
	synctest.Wait()
	return in
}

func waits(in <-chan func()) bool {
	synctest.Wait()
	return len(in) == 0
}

func TestSolo_suspectRunsAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &Solo{}
		one, two := <-entered(t.Context(), s, false), <-entered(t.Context(), s, false)
		first, second, other := entered(t.Context(), s, true), entered(t.Context(), s, true), entered(t.Context(), s, false)
		one()
		if !waits(first) || !waits(second) || !waits(other) {
			t.Fatal("a suspect runs beside another job, or a job starts before a waiting suspect")
		}
		two()
		if waits(first) && waits(second) {
			t.Fatal("the suspect does not run although nothing else runs")
		}
		runs, next := first, second
		if waits(first) {
			runs, next = second, first
		}
		if !waits(next) || !waits(other) {
			t.Fatal("something runs beside a suspect")
		}
		(<-runs)()
		if waits(next) || !waits(other) {
			t.Fatal("the second suspect is not next")
		}
		(<-next)()
		(<-other)()
	})
}

func TestSolo_waitIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &Solo{}
		hangs := <-entered(t.Context(), s, false)
		begin := time.Now()
		suspect := <-entered(t.Context(), s, true)
		if waited := time.Since(begin); waited != soloPatience {
			t.Errorf("a suspect waited for %v", waited)
		}
		ctx, cancel := context.WithCancel(t.Context())
		in := entered(ctx, s, false)
		if !waits(in) {
			t.Error("a job starts beside a suspect")
		}
		cancel()
		(<-in)()
		suspect()
		hangs()
		(*Solo)(nil).enter(t.Context(), true)()
		(<-entered(t.Context(), s, true))()
	})
}

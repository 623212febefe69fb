package lanes_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/lanes"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	most    = 4
	timeout = time.Minute
)

type call struct{ reply int }

// server answers when the test allows it, and records the calls it was sent.
type server struct {
	answer chan struct{} // closed: answers at once

	mu    sync.Mutex
	trips []int         // the number of calls in each
	waits time.Duration // until the end of the last trip's context
}

func (s *server) send(ctx context.Context, batch []*call) {
	s.mu.Lock()
	s.trips = append(s.trips, len(batch))
	end, _ := ctx.Deadline()
	s.waits = time.Until(end)
	s.mu.Unlock()
	select {
	case <-s.answer:
	case <-ctx.Done():
		return
	}
	for _, c := range batch {
		c.reply = 1
	}
}

func (s *server) sent() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.trips)
}

// scene is a test in its own synctest bubble.
type scene struct {
	*server
	t     *testing.T
	lanes *lanes.Lanes[*call]
	wg    sync.WaitGroup
}

func play(t *testing.T, fn func(s *scene)) {
	t.Parallel()
	for name, own := range map[string]bool{"own trips": true, "served": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &scene{server: &server{answer: make(chan struct{})}, t: t}
				s.lanes = &lanes.Lanes[*call]{Send: s.send, Most: most, Timeout: timeout, OwnTrips: own}
				fn(s)
				s.wg.Wait()
				time.Sleep(timeout) // the end of abandoned trips
				if active, waiting := s.lanes.Load(); active != 0 || waiting != 0 {
					t.Errorf("%d trips and %d calls are left", active, waiting)
				}
			})
		})
	}
}

// ask makes n calls and expects each to end with want.
func (s *scene) ask(ctx context.Context, n int, want error) {
	for range n {
		s.wg.Go(func() {
			c := &call{}
			if err := s.lanes.Do(ctx, c); !errors.Is(err, want) || err == nil && c.reply != 1 {
				s.t.Errorf("Do = %v, reply %d; want %v", err, c.reply, want)
			}
		})
	}
	synctest.Wait()
}

// fill takes every lane.
func (s *scene) fill(want error) {
	for range most {
		s.ask(s.t.Context(), 1, want)
	}
}

func TestCallsShareTrips(t *testing.T) {
	play(t, func(s *scene) {
		s.fill(nil)
		s.ask(s.t.Context(), 200, nil)
		if got := s.sent(); !slices.Equal(got, []int{1, 1, 1, 1}) {
			s.t.Errorf("trips of %v calls while the lanes are taken", got)
		}
		close(s.answer)
		s.wg.Wait()
		got := s.sent()[most:]
		slices.Sort(got)
		if !slices.Equal(got, []int{72, 128}) {
			s.t.Errorf("trips of %v calls, want 72 and 128", got)
		}
		s.ask(s.t.Context(), 1, nil) // the lanes are free again
		if got := s.sent(); got[len(got)-1] != 1 {
			s.t.Errorf("the last of trips %v is not alone", got)
		}
	})
}

// Calls whose callers gave up are not sent.
func TestCallerGivesUp(t *testing.T) {
	play(t, func(s *scene) {
		s.fill(nil)
		ctx, cancel := context.WithCancel(s.t.Context())
		s.ask(ctx, 3, context.Canceled)
		s.ask(s.t.Context(), 2, nil)
		cancel()
		synctest.Wait()
		close(s.answer)
		s.wg.Wait()
		if got := s.sent()[most:]; !slices.Equal(got, []int{2}) {
			s.t.Errorf("trips of %v calls, want one of 2", got)
		}
	})
}

// A server that does not answer blocks its lanes for the timeout, and no caller for longer.
func TestSilentServer(t *testing.T) {
	play(t, func(s *scene) {
		for range most {
			s.wg.Go(func() {
				c := &call{}
				if err := s.lanes.Do(s.t.Context(), c); err == nil && c.reply != 0 {
					s.t.Error("a reply from nowhere")
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		time.Sleep(timeout / 2)
		s.ask(s.t.Context(), 3, lanes.ErrTimeout)
		s.wg.Wait()
		if took := time.Since(start); took != timeout*3/2 {
			s.t.Errorf("the last caller was held until %v, want %v", took, timeout*3/2)
		}
	})
}

// A caller's own deadline ends its wait before the deadline of the trip.
func TestDo_endsAtTheCallersDeadline(t *testing.T) {
	play(t, func(s *scene) {
		close(s.answer)
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
		defer cancel()
		s.ask(ctx, 1, nil)
		want := timeout
		if s.lanes.OwnTrips {
			want = time.Second
		}
		if s.waits != want {
			s.t.Errorf("the trip may take %v, want %v", s.waits, want)
		}
	})
}

func TestTooManyWait(t *testing.T) {
	play(t, func(s *scene) {
		s.fill(nil)
		s.ask(s.t.Context(), 10_000, nil)
		s.ask(s.t.Context(), 1, lanes.ErrCrowded)
		close(s.answer)
	})
}

// A trip that ignores its timeout does not block its lane for others.
func TestTripThatIgnoresItsTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		var trips atomic.Int64
		l := &lanes.Lanes[*call]{Most: 1, Timeout: timeout, Send: func(_ context.Context, batch []*call) {
			if trips.Add(1) == 1 {
				<-stuck
			}
			for _, c := range batch {
				c.reply = 1
			}
		}}
		if err := l.Do(t.Context(), &call{}); !errors.Is(err, lanes.ErrTimeout) {
			t.Errorf("the first call got %v", err)
		}
		for range 3 {
			c := &call{}
			if err := l.Do(t.Context(), c); err != nil || c.reply != 1 {
				t.Errorf("behind it: %v, reply %d", err, c.reply)
			}
		}
		close(stuck)
		synctest.Wait()
		if active, waiting := l.Load(); active != 0 || waiting != 0 {
			t.Errorf("%d trips and %d calls are left", active, waiting)
		}
	})
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

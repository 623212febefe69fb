package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(3, time.Second)
		for n := range 10 { // a success in between keeps it closed
			if !b.Enter() {
				t.Fatalf("closed after %d calls", n)
			}
			if b.Done(n%3 == 2) {
				t.Fatal("turned although never three failed in a row")
			}
		}
		b.Done(true)
		for n := range 3 {
			if !b.Enter() || b.Done(false) != (n == 2) {
				t.Fatalf("failure %d", n)
			}
		}
		if b.Enter() {
			t.Error("open, and lets a call pass")
		}
		time.Sleep(time.Second)
		var passed atomic.Int32
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if b.Enter() {
					passed.Add(1)
				}
			})
		}
		wg.Wait()
		if passed.Load() != 1 {
			t.Errorf("%d probes passed, want 1", passed.Load())
		}
		if b.Done(false) || b.Enter() {
			t.Error("a failed probe closed it")
		}
		time.Sleep(time.Second)
		if !b.Enter() || b.Enter() { // the probe gave up: the next one may pass a pause later
			t.Error("want one probe per pause")
		}
		time.Sleep(time.Second)
		if !b.Enter() || !b.Done(true) || !b.Enter() || !b.Enter() {
			t.Error("a probe that succeeds closes it")
		}
	})
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var (
	errAnswer  = errors.New("the server rejects it")
	errRefused = errors.New("connection refused")
)

// server answers as the test prescribes.
type server struct {
	*breaker.Server
	asked  []time.Duration // since start
	start  time.Time
	silent int
	answer func(n int, ctx context.Context) error
}

func newServer(answer func(n int, ctx context.Context) error) *server {
	s := &server{start: time.Now(), answer: answer}
	s.Server = breaker.NewServer(func(err error) bool { return errors.Is(err, errAnswer) }, func(context.Context) { s.silent++ })
	return s
}

func (s *server) ask(ctx context.Context, guarded bool) error {
	return s.Ask(ctx, guarded, func(ctx context.Context) error {
		s.asked = append(s.asked, time.Since(s.start)) // timing: in a bubble
		return s.answer(len(s.asked), ctx)
	})
}

func hang(_ int, ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestSilentConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newServer(func(n int, ctx context.Context) error {
			if n == 1 {
				return hang(n, ctx)
			}
			return nil
		})
		if err := s.ask(t.Context(), true); err != nil {
			t.Error(err)
		}
		if want := []time.Duration{0, breaker.Longest}; !slices.Equal(s.asked, want) || s.silent != 1 {
			t.Errorf("asked after %v, silent %d times; want %v and one", s.asked, s.silent, want)
		}
	})
}

// Callers that all meet a silent connection at once are all answered on another connection.
func TestManySilentConnections(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := breaker.NewServer(func(error) bool { return false }, func(context.Context) {})
		var callers sync.WaitGroup
		for range 20 {
			callers.Go(func() {
				asked := 0
				if err := s.Ask(t.Context(), true, func(ctx context.Context) error {
					if asked++; asked == 1 {
						return hang(asked, ctx)
					}
					time.Sleep(time.Millisecond) // by then all others have failed, too
					return nil
				}); err != nil || asked != 2 {
					t.Errorf("%v after %d tries, want an answer to the second", err, asked)
				}
			})
		}
		callers.Wait()
	})
}

// A client may have a shorter timeout than a try.
func TestTimeoutOfTheClient(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newServer(func(n int, _ context.Context) error {
			time.Sleep(time.Second)
			return fmt.Errorf("read: %w", os.ErrDeadlineExceeded)
		})
		err := s.ask(t.Context(), true)
		if !errors.Is(err, breaker.ErrSilent) || len(s.asked) != 3 || s.silent != 3 {
			t.Errorf("%v, asked %d times, silent %d times; want ErrSilent after 3", err, len(s.asked), s.silent)
		}
	})
}

// No matter how much time the caller has, one connection never uses it all.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	const s = time.Second
	for has, want := range map[time.Duration][]time.Duration{
		0:                      {0, 2 * s, 4 * s, 6 * s},
		5 * s:                  {0, 2 * s, 3500 * time.Millisecond, 4250 * time.Millisecond},
		400 * time.Millisecond: {0, 200 * time.Millisecond, 300 * time.Millisecond, 350 * time.Millisecond},
		10 * time.Millisecond:  {0, 10 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			server, ctx := newServer(hang), t.Context()
			if has > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, has)
				defer cancel()
			}
			err := server.ask(ctx, false)
			if !errors.Is(err, breaker.ErrSilent) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("with %v: %v", has, err)
			}
			if got := append(server.asked, time.Since(server.start)); !slices.Equal(got, want) {
				t.Errorf("with %v: asked and ended after %v, want %v", has, got, want)
			}
		})
	}
}

func TestAsk_returnsEarlyErrorsAtOnce(t *testing.T) {
	t.Parallel()
	for _, want := range []error{nil, errAnswer, errRefused} {
		s := newServer(func(int, context.Context) error { return want })
		if err := s.ask(t.Context(), true); !errors.Is(err, want) || errors.Is(err, breaker.ErrSilent) || len(s.asked) != 1 || s.silent != 0 {
			t.Errorf("%v after %d tries, want %v after one", err, len(s.asked), want)
		}
	}
}

// A server that is down gets one call a second, from any caller. All calls pass as soon as it
// answers.
func TestServerDown(t *testing.T) {
	t.Parallel()
	for name, down := range map[string]func(int, context.Context) error{
		"refuses": func(int, context.Context) error { return errRefused },
		"hangs":   hang,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(down)
			for range 10 {
				_ = s.ask(t.Context(), true)
			}
			if err := s.ask(t.Context(), true); !errors.Is(err, breaker.ErrDown) || len(s.asked) != 5 {
				t.Errorf("%s: %v, asked %d times; want ErrDown after 5", name, err, len(s.asked))
			}
			time.Sleep(2 * time.Second)
			if err := s.ask(t.Context(), true); errors.Is(err, breaker.ErrDown) || len(s.asked) != 6 {
				t.Errorf("%s: %v, asked %d times; want one more", name, err, len(s.asked))
			}
			if err := s.ask(t.Context(), false); errors.Is(err, breaker.ErrDown) {
				t.Errorf("%s: a call that is not guarded: %v", name, err)
			}
			time.Sleep(10 * time.Second) // the probe of a server that hangs takes a while
			s.answer = func(int, context.Context) error { return errAnswer }
			for range 3 {
				if err := s.ask(t.Context(), true); !errors.Is(err, errAnswer) {
					t.Errorf("%s: after it: %v", name, err)
				}
			}
		})
	}
}

// Callers that give up or have short deadlines do not count against the server.
func TestCallersWhoGiveUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newServer(hang)
		for n := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Millisecond)
			if n%2 == 0 {
				ctx, cancel = context.WithCancel(t.Context())
				time.AfterFunc(time.Second, cancel)
			}
			if err := s.ask(ctx, true); err == nil || errors.Is(err, breaker.ErrDown) {
				t.Errorf("call %d: %v", n, err)
			}
			cancel()
		}
	})
}

// A caller that gives up after a while triggers a test of the idle connections. One that gives up
// soon does not.
func TestConnectionsOfCallersWhoGiveUp(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]int{400 * time.Millisecond: 0, time.Second: 1} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(hang)
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(after, cancel)
			err := s.ask(ctx, true)
			if !errors.Is(err, context.Canceled) || errors.Is(err, breaker.ErrSilent) || len(s.asked) != 1 || s.silent != want {
				t.Errorf("after %v: %v, asked %d times, silent %d times; want %d", after, err, len(s.asked), s.silent, want)
			}
		})
	}
}

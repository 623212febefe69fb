package conformance

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// switched is a processor that can be paused.
type switched struct {
	*runs
	mu      sync.Mutex
	pause   driver.Pause
	changed chan struct{}
}

var (
	_ inbox.Processor = (*switched)(nil)
	_ driver.Pausable = (*switched)(nil)
)

func (s *switched) Pause(_ context.Context, by, reason string) error {
	s.turn(driver.Pause{By: by, Reason: reason, Since: time.Now()})
	return nil
}

func (s *switched) Resume(context.Context) error {
	s.turn(driver.Pause{})
	return nil
}

func (s *switched) Paused(context.Context) (driver.Pause, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pause, nil
}

func (s *switched) turn(to driver.Pause) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause = to
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *switched) WatchPause(ctx context.Context, tell func(driver.Pause)) {
	for ctx.Err() == nil {
		s.mu.Lock()
		pause, changed := s.pause, s.changed
		s.mu.Unlock()
		tell(pause)
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// pausesLogged counts the pauses of operators that a consumer logs, each from when nothing begins any more.
type pausesLogged struct {
	slog.Handler
	n atomic.Int64
}

func (p *pausesLogged) Enabled(context.Context, slog.Level) bool { return true }

func (p *pausesLogged) WithAttrs([]slog.Attr) slog.Handler { return p }

func (p *pausesLogged) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "paused by an operator" {
		p.n.Add(1)
	}
	return nil
}

func (p *pausesLogged) count() int { return int(p.n.Load()) }

// A pause begins no message, also not at the start of a consumer, ends what was begun, and costs no message
// an attempt. The consumer stays ready.
func testConsumerPaused(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		const n = 20
		cfg := cfg // others run beside it
		p := &switched{runs: &runs{}, changed: make(chan struct{})}
		p.turn(driver.Pause{By: "ada", Since: time.Now()})
		log := &pausesLogged{}
		cfg.Logger = slog.New(log)
		publishMany(t, f, "event", n)
		w := consume(t, f, p, cfg)
		for k := range 3 {
			awaitCount(t, "pauses", k+1, log.count)
			if k > 0 {
				publishMany(t, f, "event", n)
			}
			time.Sleep(quiet)
			if begun := p.count(); begun != k*n {
				t.Errorf("%d messages were begun, want %d", begun, k*n)
			}
			w.awaitReady(true)
			if k == 2 {
				break
			}
			p.turn(driver.Pause{})
			awaitCount(t, "messages done", (k+1)*n, p.finished)
			p.turn(driver.Pause{By: "ada", Since: time.Now()})
		}
		w.stop()
		wantRest(t, f, n)
		p.wantFirst(t, anyMessage)
	}
}

package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// faulty is a Source that fails while told to.
type faulty struct {
	driver.Source
	mu            sync.Mutex
	claim, settle error
	once          bool // the claim fails once
	held          bool // the claim that fails holds its lanes
}

func (f *faulty) set(claim, settle error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.claim, f.settle = claim, settle
}

func (f *faulty) errors() (claim, settle error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.claim, f.settle
}

func (f *faulty) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	if err, _ := f.errors(); err != nil {
		if f.once {
			f.set(nil, nil)
		}
		if f.held {
			_, _ = f.Source.Claim(ctx, r)
		}
		return driver.Batch{}, err
	}
	return f.Source.Claim(ctx, r)
}

func (f *faulty) Settle(ctx context.Context, b driver.Batch, o []driver.Settlement) (driver.Settled, error) {
	if _, err := f.errors(); err != nil {
		return driver.Settled{}, err
	}
	return f.Source.Settle(ctx, b, o)
}

func TestStoreFaults(t *testing.T) {
	down := errors.New("connection refused")
	t.Run("claim", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(down, nil)
			b.write(message("k", 1))
			if _, err := b.relay.Drain(b.Context(), outbox.Bounds{}); !errors.Is(err, down) {
				b.Errorf("Drain: %v", err)
			}
			defer b.start()()
			time.Sleep(time.Minute)
			if b.relay.Ready(b.Context()) == nil {
				b.Error("Ready while the store is down")
			}
			f.set(nil, nil)
			time.Sleep(3 * time.Second) // the longest pause
			synctest.Wait()
			b.wantReceived("1")
		})
	})
	t.Run("claim, once", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.once = true
			f.set(down, nil)
			b.write(message("k", 1))
			if report := b.drain(outbox.Bounds{Limit: 1}); report.Published != 1 {
				b.Errorf("%+v", report)
			}
		})
	})
	t.Run("claim, once, whose lanes are held", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			const lanes = 16 // more than a claim takes: the next one finds others
			f := b.wrap()
			f.once, f.held = true, true
			f.set(down, nil)
			for n := range lanes {
				b.write(message(fmt.Sprint("k", n), n))
			}
			if report := b.drain(outbox.Bounds{}); report.Published != lanes || report.Ended != "empty" {
				b.Errorf("%+v", report)
			}
		})
	})
	t.Run("settle", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(10 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			b.wantReceived("1", "2") // settled late, but not published twice
		})
	})
	t.Run("settle too late", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(40 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			got := bodies(b.publisher.Received())
			if len(got) < 4 || !slices.Equal(got[:4], []string{"1", "2", "1", "2"}) || len(b.store.Pending()) != 0 {
				b.Errorf("received %v, left %d", got, len(b.store.Pending()))
			}
		})
	})
}

// wrap puts a faulty Source before the bench's store.
func (b *bench) wrap() *faulty {
	f := &faulty{Source: b.store}
	b.over(f, outbox.RelayConfig{})
	return f
}

// over makes the bench's relay again, over another source.
func (b *bench) over(source driver.Source, cfg outbox.RelayConfig) {
	b.Helper()
	b.between(source, b.publisher, cfg)
}

// between makes the bench's relay again, over another source and with another publisher.
func (b *bench) between(source driver.Source, p driver.Publisher, cfg outbox.RelayConfig) {
	b.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	var err error
	b.relay, err = outbox.NewRelay(source, p, cfg)
	must(b, err)
}

// fullDisk is a Source that has no room for failures, as long as it is full.
type fullDisk struct {
	driver.Source
	full atomic.Bool
}

func newFullDisk(source driver.Source) *fullDisk {
	s := &fullDisk{Source: source}
	s.full.Store(true)
	return s
}

var errDiskFull = errors.New("no space left on device")

func (s *fullDisk) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	failed := func(o driver.Settlement) bool { return o.Verdict != driver.Published }
	if s.full.Load() && slices.ContainsFunc(outcomes, failed) {
		return driver.Settled{}, errDiskFull
	}
	return s.Source.Settle(ctx, b, outcomes)
}

// A store that cannot record failures costs the messages that were published nothing, and accuses none
// of those that failed. These are tried again, and not in a hot loop.
func TestFailuresThatCannotBeRecorded(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		disk := newFullDisk(b.store)
		b.over(disk, outbox.RelayConfig{})
		var attempts atomic.Int64
		b.publisher.Respond(func(m driver.Message) error {
			if m.Key == "bad" {
				attempts.Add(1)
				return &driver.PublishError{Class: driver.Permanent, Err: errors.New("refused")}
			}
			return nil
		})
		b.write(message("bad", 0), message("good", 1), message("", 2))
		stop := b.start()
		time.Sleep(10 * time.Second)
		b.wantReceived("1", "2")
		if len(b.store.Pending()) != 1 || b.store.Pending()[0].Attempts != 0 || len(b.dead()) != 0 {
			b.Errorf("left %+v, dead letters %+v", b.store.Pending(), b.dead())
		}
		if err := b.relay.Ready(b.Context()); err == nil || !strings.Contains(err.Error(), "no space left") {
			b.Errorf("Ready says %v", err)
		}
		if n := attempts.Load(); n < 2 || n > 40 {
			b.Errorf("%d attempts in 10 s", n)
		}
		disk.full.Store(false)
		time.Sleep(5 * time.Second)
		stop()
		if dead := b.dead(); len(dead) != 1 || dead[0].Class != string(driver.Permanent) || dead[0].Attempts != 1 {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

// A relay that cannot settle is not lost, however often: nothing it has in hand is suspected.
func TestRefusedSettlementsAccuseNobody(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s := &refusing{Source: b.store}
		b.over(s, outbox.RelayConfig{})
		b.write(message("k", 0), message("k", 1))
		defer b.start()()
		time.Sleep(10 * time.Minute)
		if s.suspected.Load() {
			b.Error("a message is suspected of having ended relays")
		}
	})
}

// refusing is a Source that records nothing.
type refusing struct {
	driver.Source
	suspected atomic.Bool
}

func (s *refusing) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	b, err := s.Source.Claim(ctx, req)
	if b.Suspect {
		s.suspected.Store(true)
	}
	return b, err
}

func (s *refusing) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (driver.Settled, error) {
	if len(outcomes) > 0 {
		return driver.Settled{}, errDiskFull
	}
	return s.Source.Settle(ctx, b, outcomes)
}

// A drain says so.
func TestDrainOntoAFullDisk(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(newFullDisk(b.store), outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		b.publisher.Respond(func(m driver.Message) error {
			if m.Key == "bad" {
				return errors.New("refused")
			}
			return nil
		})
		b.write(message("bad", 0), message("good", 1))
		report, err := b.relay.Drain(b.Context(), outbox.Bounds{})
		if !errors.Is(err, errDiskFull) || report.Published != 1 || report.Failed != 0 {
			b.Errorf("report %+v, %v", report, err)
		}
	})
}

package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

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

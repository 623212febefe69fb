package conformance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
)

// parker is a processor that keeps keys that wait.
type parker struct {
	remembering
	parking driver.Parking
}

// Parking implements driver.Parker.
func (p parker) Parking(bool) driver.Parking { return p.parking }

func parked(s *sequence) parker {
	return parker{remembering{s, memory.NewLedger()}, memory.NewParking()}
}

// A key waits for its dead letter, and goes on in order when that is replayed or removed; others go on.
func testOrderParked(t *testing.T, f ConsumerFixture) {
	const each = 6
	var mended atomic.Bool
	s := publishKeyed(t, f, 3, each)
	stopped := map[uuid.UUID]bool{} // one message of key-0 and one of key-1
	for id, n := range s.number {
		stopped[id] = n == 2 && s.keys[id] != "key-2"
	}
	s.fail = func(m *inbox.Message) error {
		if stopped[m.ID] && !mended.Load() {
			return inbox.Unrecoverable(errBoom)
		}
		return nil
	}
	cfg := ordered(ConsumerConfig{})
	cfg.ParkKeys = true
	w := consume(t, f, parked(s), cfg)
	awaitCount(t, "messages done", each+2+2, s.finished)
	l := w.DeadLetters()
	await(t, func() error {
		if found, err := l.List(t.Context(), inbox.Filter{}); err != nil || len(found) != 2 {
			return fmt.Errorf("%d dead letters, error %w", len(found), err)
		}
		return nil
	})
	time.Sleep(quiet)
	if n := s.finished(); n != each+2+2 {
		t.Errorf("%d messages took effect, want %d: a key does not wait", n, each+2+2)
	}
	mended.Store(true)
	found, err := l.List(t.Context(), inbox.Filter{})
	if err != nil || len(found) != 2 {
		t.Fatalf("%d dead letters, error %v", len(found), err)
	}
	removed := found[0].Message
	s.skip(removed.Key)
	if n, err := l.Remove(t.Context(), inbox.Filter{IDs: []uuid.UUID{removed.ID}}, inbox.Removal{By: "suite"}); n != 1 || err != nil {
		t.Errorf("removed %d, error %v", n, err)
	}
	if n, err := l.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite"}); n.Returned != 1 || err != nil {
		t.Errorf("returned %+v, error %v", n, err)
	}
	awaitCount(t, "messages done", 3*each, s.finished)
	w.stop()
	wantRest(t, f, 0)
}

// Keys that are stopped and replayed again and again, over consumers that take turns, stay in order.
func testOrderParkedOften(t *testing.T, f ConsumerFixture) {
	const keys, each = 4, 9
	s := publishKeyed(t, f, keys, each)
	s.fail = func(*inbox.Message) error {
		switch rand.IntN(10) {
		case 0:
			return inbox.Unrecoverable(errBoom)
		case 1:
			return errBoom
		}
		return nil
	}
	p := parked(s)
	cfg := ordered(ConsumerConfig{})
	cfg.ParkKeys = true
	w := launch(t, f, p, cfg)
	replay := func() error {
		_, err := w.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite"})
		return err
	}
	for third := 1; third <= 3; third++ {
		await(t, func() error {
			if n := s.finished(); n < third*keys*each/3 {
				time.Sleep(quiet)
				return errors.Join(fmt.Errorf("%d of %d messages done", n, keys*each), replay())
			}
			return nil
		})
		w.stop()
		w = launch(t, f, p, cfg)
	}
	await(t, func() error { // what has taken effect may be on its way out
		heads, err := p.parking.Heads(t.Context(), "", 10)
		if len(heads) > 0 {
			err = errors.Join(err, fmt.Errorf("%d keys wait", len(heads)), replay())
		}
		return err
	})
	w.stop()
	wantRest(t, f, 0)
}

// Keys are parked and replayed all the time while connections are cut: none is out of order.
func testOrderParkedThroughCuts(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const keys, each = 8, 30
	s := publishKeyed(t, f, keys, each)
	var faulty atomic.Bool
	faulty.Store(true)
	often := oneIn(8, inbox.Unrecoverable(errBoom))
	s.fail = func(m *inbox.Message) error {
		if !faulty.Load() {
			return nil
		}
		return often(m)
	}
	p := parked(s)
	cfg := ordered(ConsumerConfig{})
	cfg.ParkKeys = true
	w := consume(t, f, p, cfg)
	operated := make(chan struct{})
	var operator sync.WaitGroup
	operator.Go(func() {
		for {
			select {
			case <-operated:
				return
			case <-time.After(quiet / 4):
				_, _ = w.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite"}) // the network may be cut
			}
		}
	})
	for k := range 3 {
		awaitCount(t, "messages done", (k+1)*keys*each/8, s.finished)
		f.Network.CutConnections()
	}
	faulty.Store(false)
	awaitCount(t, "messages done", keys*each, s.finished)
	close(operated)
	operator.Wait()
	await(t, func() error {
		heads, err := p.parking.Heads(t.Context(), "", 10)
		if len(heads) > 0 {
			err = errors.Join(err, fmt.Errorf("%d keys wait", len(heads)))
		}
		return err
	})
	w.stop()
	wantRest(t, f, 0)
}

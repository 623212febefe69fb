package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Whatever call the network fails in, and whether it took effect or not: every message is settled
// by somebody in the end, and none of its own accord.
func testSourceFaults(t *testing.T, f SourceFixture) {
	if f.Network == nil {
		t.Skip("there is no network to break")
	}
	const n = 40
	m := &model{t: t, f: f, source: running(t, f), alive: map[uuid.UUID]bool{}, settled: map[uuid.UUID]int{}}
	for _, msg := range numbered(t, f, n) {
		m.alive[msg.ID] = true
	}
	over := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.breakNetwork(over)
	}()
	for deadline := time.Now().Add(patience / 2); len(m.settled) < n*9/10 && time.Now().Before(deadline); {
		m.session(rand.IntN(10) + 1)
	}
	close(over)
	<-done
	await(t, func() error { return m.source.Ready(t.Context()) })
	await(t, func() error { // what was taken for settled, and was not
		m.session(10)
		for _, d := range scan(t, f, driver.ClassDefault) { // some whose answer was lost
			m.settled[d.Message.ID]++
		}
		if len(m.settled) < n {
			return fmt.Errorf("%d of %d messages are settled", len(m.settled), n)
		}
		return nil
	})
	for id := range m.settled {
		if !m.alive[id] {
			t.Errorf("%s was never published", id)
		}
	}
}

// model settles messages in random ways over a network that fails.
type model struct {
	t       *testing.T
	f       SourceFixture
	source  driver.Source
	alive   map[uuid.UUID]bool
	settled map[uuid.UUID]int // acknowledged, or dead letters
}

func (m *model) breakNetwork(over <-chan struct{}) {
	defer m.f.Network.Heal()
	for i := range 6 {
		select {
		case <-over:
			return
		case <-time.After(time.Duration(100+rand.IntN(300)) * time.Millisecond):
		}
		switch i % 3 {
		case 0:
			m.f.Network.CutConnections()
			continue
		case 1:
			m.f.Network.DropReplies()
		case 2:
			m.f.Network.Pause()
		}
		select {
		case <-over:
			return
		case <-time.After(time.Duration(100+rand.IntN(500)) * time.Millisecond):
		}
		m.f.Network.CutConnections()
		m.f.Network.Heal()
	}
}

// session takes messages and settles them until it is lost or nothing comes.
func (m *model) session(most int) {
	ctx, cancel := context.WithTimeout(m.t.Context(), 30*time.Second)
	defer cancel()
	s, err := m.source.Open(ctx)
	if err != nil {
		time.Sleep(100 * time.Millisecond)
		return
	}
	defer func() { _ = s.Close(context.WithoutCancel(ctx)) }() // it may be lost
	if err := s.Start(ctx, most); err != nil {
		return
	}
	for range 20 {
		short, end := context.WithTimeout(ctx, time.Second)
		ds, err := s.Receive(short, most)
		end()
		if err != nil {
			return
		}
		for _, d := range ds {
			if err := m.settle(ctx, s, d); err != nil {
				return
			}
		}
	}
}

func (m *model) settle(ctx context.Context, s driver.Session, d driver.Delivery) error {
	id, msg := d.Message().ID, d.Message()
	one := []driver.Delivery{d}
	switch k := rand.IntN(10); {
	case k < 2:
		return s.GiveBack(ctx, one)
	case k < 5:
		return m.move(ctx, s, later(d, 50*time.Millisecond, driver.Progress{Attempt: msg.Attempt + 1}))
	case k < 6:
		letter := driver.NewDeadLetter(msg, driver.Failure{Class: driver.ClassDefault, Err: errors.New("broken")}, "suite", time.Now())
		return m.move(ctx, s, driver.Move{Delivery: d, Target: driver.ToDead, Letter: letter})
	}
	// It counts at once: what the call says cannot be known by the broker's side, and the effect
	// of a handler is durable already.
	m.settled[id]++
	return s.Ack(ctx, one, false)
}

func (m *model) move(ctx context.Context, s driver.Session, move driver.Move) error {
	err := m.source.Move(ctx, []driver.Move{move})[0]
	switch {
	case errors.Is(err, driver.ErrStale):
		return nil // it comes again, or the move was done and its answer lost
	case err != nil:
		return s.GiveBack(ctx, []driver.Delivery{move.Delivery})
	}
	if m.source.Traits().MoveSettles {
		return nil
	}
	return s.Ack(ctx, []driver.Delivery{move.Delivery}, false)
}

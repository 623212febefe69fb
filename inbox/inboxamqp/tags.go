package inboxamqp

import (
	"cmp"
	"slices"
	"sync"
)

// tags knows which deliveries of a channel are settled, so that one acknowledgement can
// cover several: the broker takes "multiple" for all tags up to it, those still in work
// included, so it may be used on a settled prefix only. What workers finish beyond the prefix
// waits for a short time until the prefix has grown: an acknowledgement for each costs the broker
// as much as the message did.
type tags struct {
	mu     sync.Mutex
	first  uint64 // the lowest tag that is not settled; those before it are gone
	states []tagState
	unsaid int // how many are acked or late
}

type tagState byte

const (
	tagOpen  tagState = iota
	tagAcked          // to be acknowledged; the broker does not know yet
	tagLate           // so since the last look at what is late
	tagSettled
)

// add notes a delivery. Tags begin at 1 and have no gaps; if there ever were one, nothing
// beyond it would be acknowledged together.
func (t *tags) add(tag uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.first = max(t.first, 1)
	for t.first+uint64(len(t.states)) <= tag {
		t.states = append(t.states, tagOpen)
	}
}

// acker writes an acknowledgement.
type acker func(tag uint64, multiple bool) error

// settle notes that a delivery was settled by itself. Those behind it may have waited for it.
func (t *tags) settle(tag uint64, ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set(tag, tagSettled)
	return t.prefix(ack)
}

// acknowledge notes deliveries as done and writes one acknowledgement for all in the settled prefix.
// The others wait; if that are more than most, each gets one of its own. It holds the lock meanwhile,
// so that no later prefix is written first, and returns the first error.
func (t *tags) acknowledge(done []uint64, most int, ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range done {
		t.set(tag, tagAcked)
	}
	err := t.prefix(ack)
	if t.unsaid > most {
		err = cmp.Or(err, t.each(ack, tagAcked, tagLate))
	}
	return err
}

// hasten acknowledges what has waited since the last call, and reports whether anything still waits.
func (t *tags) hasten(ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.each(ack, tagLate)
	for i, state := range t.states {
		if state == tagAcked {
			t.states[i] = tagLate
		}
	}
	return t.unsaid > 0, err
}

// waits reports whether anything waits for the prefix to grow.
func (t *tags) waits() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unsaid > 0
}

// flush acknowledges all that waits.
func (t *tags) flush(ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.each(ack, tagAcked, tagLate)
}

// prefix drops the settled prefix and writes one acknowledgement for what is unsaid in it.
func (t *tags) prefix(ack acker) error {
	before := t.first
	last := t.trim()
	if last == 0 {
		return nil
	}
	return ack(last, last > before)
}

// each acknowledges what is in one of the states, one by one. It returns the first error.
func (t *tags) each(ack acker, of ...tagState) (err error) {
	for i, state := range t.states {
		if slices.Contains(of, state) {
			err = cmp.Or(err, ack(t.first+uint64(i), false))
			t.states[i] = tagSettled
			t.unsaid--
		}
	}
	return err
}

// open returns how many deliveries are not settled.
func (t *tags) open() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, state := range t.states {
		if state == tagOpen {
			n++
		}
	}
	return n
}

func (t *tags) set(tag uint64, state tagState) {
	i := tag - t.first
	if tag < t.first || i >= uint64(len(t.states)) {
		return
	}
	if t.states[i] == tagOpen && state == tagAcked {
		t.unsaid++
	}
	t.states[i] = state
}

// trim drops the settled prefix and returns the highest tag in it that is still to be
// acknowledged, 0 if there is none.
func (t *tags) trim() (last uint64) {
	n := 0
	for n < len(t.states) && t.states[n] != tagOpen {
		if t.states[n] != tagSettled {
			last = t.first + uint64(n)
			t.unsaid--
		}
		n++
	}
	t.states = t.states[n:]
	t.first += uint64(n)
	return last
}

package inboxamqp

import "sync"

// tags knows which deliveries of a channel are settled, so that one acknowledgement can
// cover several: the broker takes "multiple" for all tags up to it, those still in work
// included, so it may be used on a settled prefix only.
type tags struct {
	mu     sync.Mutex
	first  uint64 // the lowest tag that is not settled; those before it are gone
	states []tagState
}

type tagState byte

const (
	tagOpen  tagState = iota
	tagAcked          // to be acknowledged; the broker does not know yet
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

// settle notes that a delivery was settled by itself.
func (t *tags) settle(tag uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set(tag, tagSettled)
	t.trim()
}

// acknowledge notes deliveries as done and writes their acknowledgements: one for all in the
// settled prefix, and one for each of the others. It holds the lock meanwhile, so that no
// later prefix is written first, and returns the first error.
func (t *tags) acknowledge(done []uint64, ack func(tag uint64, multiple bool) error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range done {
		t.set(tag, tagAcked)
	}
	before := t.first
	last := t.trim()
	var err error
	if last != 0 {
		err = ack(last, last > before)
	}
	for _, tag := range done {
		if tag < t.first {
			continue
		}
		if single := ack(tag, false); err == nil {
			err = single
		}
		t.set(tag, tagSettled)
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
	if i := tag - t.first; tag >= t.first && i < uint64(len(t.states)) {
		t.states[i] = state
	}
}

// trim drops the settled prefix and returns the highest tag in it that is still to be
// acknowledged, 0 if there is none.
func (t *tags) trim() (last uint64) {
	n := 0
	for n < len(t.states) && t.states[n] != tagOpen {
		if t.states[n] == tagAcked {
			last = t.first + uint64(n)
		}
		n++
	}
	t.states = t.states[n:]
	t.first += uint64(n)
	return last
}

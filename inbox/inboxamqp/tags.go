package inboxamqp

import (
	"cmp"
	"slices"
	"sync"
)

// tags knows which deliveries of a channel are settled, so that one acknowledgement can
// cover several: the broker takes "multiple" for all tags up to it, those still in work
// included, so it may be used on a settled prefix only. What workers finish beyond the prefix
// may wait for a short time until the prefix has grown: an acknowledgement for each costs the broker
// as much as the message did.
type tags struct {
	mu      sync.Mutex
	first   uint64   // the lowest tag in work; those before it are gone
	ended   []bool   // from first on: done or settled otherwise
	waiting []uint64 // done, and the broker does not know yet
	late    int      // so many of waiting, from its begin, waited at the last look
}

// add notes a delivery. Tags begin at 1 and have no gaps; if there ever were one, nothing
// beyond it would be acknowledged together.
func (t *tags) add(tag uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.first = max(t.first, 1)
	for t.first+uint64(len(t.ended)) <= tag {
		t.ended = append(t.ended, false)
	}
}

// acker writes an acknowledgement.
type acker func(tag uint64, multiple bool) error

// settle notes that a delivery was settled by itself. Those behind it may have waited for it.
func (t *tags) settle(tag uint64, ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(tag)
	return t.prefix(ack)
}

// acknowledge notes deliveries as done and writes one acknowledgement for all in the settled prefix.
// The others wait; if there are more than most, each gets one of its own. It holds the lock meanwhile,
// so that no later prefix is written first. It reports whether any waits, and returns the first error.
func (t *tags) acknowledge(done []uint64, most int, ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range done {
		if t.end(tag) {
			t.waiting = append(t.waiting, tag)
		}
	}
	err = t.prefix(ack)
	if n := len(t.waiting); n > most {
		err = cmp.Or(err, t.tell(n, ack))
	}
	return len(t.waiting) > 0, err
}

// hasten acknowledges what has waited since the last look, and reports whether any still waits.
func (t *tags) hasten(ack acker) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.tell(t.late, ack)
	t.late = len(t.waiting)
	return t.late > 0, err
}

// flush acknowledges all that waits.
func (t *tags) flush(ack acker) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tell(len(t.waiting), ack)
}

// open returns how many deliveries are in work.
func (t *tags) open() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ended := range t.ended {
		if !ended {
			n++
		}
	}
	return n
}

// end notes that a delivery is no longer in work. It reports whether it was.
func (t *tags) end(tag uint64) bool {
	i := tag - t.first
	if tag < t.first || i >= uint64(len(t.ended)) || t.ended[i] {
		return false
	}
	t.ended[i] = true
	return true
}

// prefix drops what has ended before the lowest tag in work, and writes one acknowledgement for what waits of it.
func (t *tags) prefix(ack acker) error {
	before := t.first
	for len(t.ended) > 0 && t.ended[0] {
		t.ended = t.ended[1:]
		t.first++
	}
	if t.first == before {
		return nil
	}
	last, late, rest := uint64(0), t.late, t.waiting[:0]
	for i, tag := range t.waiting {
		if tag >= t.first {
			rest = append(rest, tag)
			continue
		}
		last = max(last, tag)
		if i < t.late {
			late--
		}
	}
	t.waiting, t.late = rest, late
	if last == 0 {
		return nil
	}
	return ack(last, last > before)
}

// tell acknowledges the first n that wait, one by one. It returns the first error.
func (t *tags) tell(n int, ack acker) (err error) {
	for _, tag := range t.waiting[:n] {
		err = cmp.Or(err, ack(tag, false))
	}
	t.waiting = slices.Delete(t.waiting, 0, n)
	t.late = max(t.late-n, 0)
	return err
}

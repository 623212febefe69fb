package memqueue

import (
	"slices"

	"github.com/holdfast-go/holdfast/inbox"
)

// hand is what a session has received and not settled. The broker's lock guards it.
type hand struct {
	queue   *Queue
	window  int // 0: stopped
	starts  int // calls of Start
	counted int // unsettled ones since the last Start
	taken   map[*delivery]bool
	lost    error // why the session is over
}

// delivery is one hand-out of an entry.
type delivery struct {
	hand  *hand
	entry *entry
	start int
	msg   *inbox.Message
}

// Message implements driver.Delivery.
func (d *delivery) Message() *inbox.Message { return d.msg }

// start lets messages be taken.
func (h *hand) start(window int) {
	h.window, h.counted = window, 0
	h.starts++
	if !slices.Contains(h.queue.hands, h) {
		h.queue.hands = append(h.queue.hands, h)
	}
	h.queue.broker.change()
}

// take takes the first message of the queue; nil where there is none for this session.
func (h *hand) take() *delivery {
	q := h.queue
	standsBy := q.exclusive && (len(q.hands) == 0 || q.hands[0] != h)
	if h.lost != nil || standsBy || len(q.ready) == 0 || h.counted >= h.window {
		return nil
	}
	e := q.ready[0]
	q.ready = q.ready[1:]
	q.unsettled++
	h.counted++
	d := &delivery{hand: h, entry: e, start: h.starts, msg: clone(e.msg)}
	h.taken[d] = true
	return d
}

// settle takes a delivery out; false when it is not in there any more.
func (h *hand) settle(d *delivery) bool {
	if !h.taken[d] {
		return false
	}
	delete(h.taken, d)
	if d.start == h.starts {
		h.counted--
	}
	h.queue.unsettled--
	h.queue.broker.change()
	return true
}

// giveBack puts a delivery back where it was; false when it is not in there any more.
func (h *hand) giveBack(d *delivery) bool {
	if !h.settle(d) {
		return false
	}
	h.queue.back(d.entry)
	return true
}

// lose ends the session: all that is unsettled goes back in its order.
func (h *hand) lose(err error) {
	if h.lost != nil {
		return
	}
	h.lost, h.window = err, 0
	for d := range h.taken {
		h.giveBack(d)
	}
	h.queue.hands = slices.DeleteFunc(h.queue.hands, func(other *hand) bool { return other == h })
	h.queue.broker.change()
}

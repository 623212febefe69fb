package inboxredis

import (
	"cmp"
	"context"
	"sync"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// place is where an entry is: 0 in the stream, 1 among the retries, and its id.
type place struct {
	stream int
	id     string
}

// entry is one of a stream, as it was read.
type entry struct {
	place

	fields      map[string]any
	redelivered bool
}

// delivery is one hand-out of an entry.
type delivery struct {
	place

	session     *session
	start       int            // of the session; 0: not handed out yet
	fields      map[string]any // as they came
	redelivered bool
	read        sync.Once
	msg         *inbox.Message
}

// Message implements driver.Delivery.
func (d *delivery) Message() *inbox.Message {
	d.read.Do(func() {
		d.msg = message(entry{d.place, d.fields, d.redelivered}, d.session.group.keys.stream, d.session.group.cfg.symfony)
	})
	return d.msg
}

// Slow implements driver.SlowDelivery.
func (d *delivery) Slow() bool { return slow(d.fields, d.session.group.cfg.symfony) }

// hand is what a session has read and not settled.
type hand struct {
	settled chan struct{} // there may be room

	mu     sync.Mutex
	all    map[place]*delivery
	spare  []*delivery // not handed out yet
	window int         // 0: stopped
	starts int
	out    int   // handed out since the last start and not settled
	lost   error // why nothing is delivered any more
}

func newHand() *hand { return &hand{settled: make(chan struct{}, 1), all: map[place]*delivery{}} }

func (h *hand) start(window int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.starts++
	h.window, h.out = window, 0
	return h.lost
}

// stop returns what was not handed out.
func (h *hand) stop() []*delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	spare := h.spare
	h.window, h.spare = 0, nil
	return spare
}

// await waits for room in the window, and returns how much there is.
func (h *hand) await(ctx context.Context) (room int, err error) {
	for {
		h.mu.Lock()
		room, err = h.window-h.out, h.lost
		h.mu.Unlock()
		if err = cmp.Or(err, ctx.Err()); err != nil || room > 0 {
			return room, err
		}
		select {
		case <-ctx.Done():
		case <-h.settled:
		}
	}
}

// add puts what was read into the hand. What is there already was claimed because the server has not
// heard of it for long.
func (h *hand) add(deliveries []*delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range deliveries {
		if h.all[d.place] == nil {
			h.all[d.place] = d
			h.spare = append(h.spare, d)
		}
	}
}

// next hands out what was read, as far as there is room.
func (h *hand) next(room int) []driver.Delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := min(room, len(h.spare))
	ds := make([]driver.Delivery, n)
	for i, d := range h.spare[:n] {
		d.start = h.starts
		ds[i] = d
	}
	h.spare, h.out = h.spare[n:], h.out+n
	return ds
}

// have returns those that are still in the hand.
func (h *hand) have(ds []driver.Delivery) []*delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []*delivery
	for _, one := range ds {
		if d := one.(*delivery); h.all[d.place] == d {
			all = append(all, d)
		}
	}
	return all
}

// forget takes deliveries out of the hand: they are settled, or no longer the session's.
func (h *hand) forget(ds ...*delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range ds {
		if h.all[d.place] != d {
			continue
		}
		delete(h.all, d.place)
		if d.start == h.starts {
			h.out--
		}
	}
	h.wake()
}

// held returns what is in the hand; nothing when the session is lost.
func (h *hand) held() (ds []*delivery, lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost != nil {
		return nil, true
	}
	ds = make([]*delivery, 0, len(h.all))
	for _, d := range h.all {
		ds = append(ds, d)
	}
	return ds, false
}

// lose ends the deliveries.
func (h *hand) lose(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = cmp.Or(h.lost, err)
	h.wake()
}

// empty drops all.
func (h *hand) empty() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.all)
	h.spare = nil
}

// wake has await look again.
func (h *hand) wake() {
	select {
	case h.settled <- struct{}{}:
	default:
	}
}

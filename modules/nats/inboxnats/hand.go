package inboxnats

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// hand contains the received and unsettled deliveries of a session.
type hand struct {
	changed chan struct{} // something has arrived, or there is room

	mu     sync.Mutex
	all    map[place]*delivery
	spare  []*delivery // not handed out yet
	window int         // 0: stopped
	starts int
	out    int   // handed out since the last start and unsettled
	lost   error // why deliveries have ended

	// A new owner hands out nothing until it has all messages delivered before: hold messages up to the horizon, at
	// the latest at until.
	hold    int
	horizon uint64
	early   bool      // a newer one has arrived: they are not due yet
	recount time.Time // when to ask the server for their number
	until   time.Time
}

func newHand() *hand { return &hand{changed: make(chan struct{}, 1), all: map[place]*delivery{}} }

func (h *hand) start(window int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.starts++
	h.window, h.out = window, 0
	return h.lost
}

// stop ends the deliveries. Messages that arrive later are not handed out.
func (h *hand) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.window = 0
}

// unseen removes and returns the deliveries that were not handed out.
func (h *hand) unseen() []*delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	spare := h.spare
	h.spare = nil
	for _, d := range spare {
		delete(h.all, d.place)
	}
	return spare
}

// drop removes and returns all deliveries.
func (h *hand) drop() (all []*delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.all {
		all = append(all, d)
	}
	clear(h.all)
	h.spare = nil
	return all
}

// room is the number of messages to request beside the requested ones. It is 0 while fewer places are free than messages
// on their way, because many small requests cost more. The caller holds the lock.
func (h *hand) room(asked int) int {
	if h.lost != nil || h.window == 0 {
		return 0
	}
	if h.hold > 0 && h.early {
		return max(1-asked, 0)
	}
	if h.hold > 0 {
		return max(h.hold-asked, 0)
	}
	coming := len(h.spare) + asked
	if n := h.window - h.out - coming; n >= coming {
		return n
	}
	return 0
}

// add adds a delivery. A known message is ignored: the server has redelivered it because it heard nothing for long.
// It reports whether the delivery is newer than those that a new owner waits for. The caller holds the lock.
func (h *hand) add(d *delivery) (newer bool) {
	if h.all[d.place] != nil {
		return false
	}
	h.all[d.place] = d
	h.spare = append(h.spare, d)
	switch {
	case h.hold == 0:
		return false
	case d.seq > h.horizon:
		h.early = true
		return true
	}
	h.hold--
	h.sorted()
	return false
}

// sorted sorts the deliveries once the hold has ended. The caller holds the lock.
func (h *hand) sorted() {
	if h.hold == 0 {
		slices.SortFunc(h.spare, func(a, b *delivery) int { return cmp.Compare(a.seq, b.seq) })
		h.wake()
	}
}

// next hands out deliveries while the window has room.
func (h *hand) next(most int) ([]driver.Delivery, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost != nil {
		return nil, h.lost
	}
	if h.hold > 0 {
		return nil, nil
	}
	n := max(min(most, len(h.spare), h.window-h.out), 0)
	ds := make([]driver.Delivery, n)
	for i, d := range h.spare[:n] {
		d.start = h.starts
		ds[i] = d
	}
	h.spare, h.out = h.spare[n:], h.out+n
	return ds, nil
}

// take removes the deliveries that the session still has, and returns them: each is settled once.
func (h *hand) take(ds []driver.Delivery) (all []*delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range ds {
		d := one.(*delivery)
		if h.all[d.place] != d {
			continue
		}
		delete(h.all, d.place)
		if d.start == h.starts {
			h.out--
		}
		all = append(all, d)
	}
	return all
}

// held returns all deliveries, or nothing if the session is lost.
func (h *hand) held() (ds []*delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost != nil {
		return nil
	}
	for _, d := range h.all {
		ds = append(ds, d)
	}
	return ds
}

// bySubject counts the deliveries: messages of the stream by its name, retries by their subjects.
func (h *hand) bySubject() map[string]int {
	counts := map[string]int{}
	for _, d := range h.held() {
		if d.retries {
			counts[d.msg.Subject]++
		} else {
			counts[d.meta.Stream]++
		}
	}
	return counts
}

// lose ends the deliveries.
func (h *hand) lose(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = cmp.Or(h.lost, err)
	h.wake()
}

// wake wakes Receive.
func (h *hand) wake() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

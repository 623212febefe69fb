package inboxredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

var (
	errClosed = errors.New("inboxredis: the session is closed")
	errLease  = errors.New("inboxredis: another process serves the stream now")
)

// ackAtOnce is the number of ids that one command acknowledges.
const ackAtOnce = 1000

// session implements driver.Session.
type session struct {
	source *source
	group  *group
	name   string // the consumer name; for ordered consumers also the token of the lease
	hand   *hand
	reader reader
}

// reader takes entries from the server.
type reader interface {
	// read waits up to a second for entries, and returns at most most, or at most most of each stream.
	read(ctx context.Context, most int) ([]entry, error)
	// renews reports whether a session with held entries must be renewed.
	renews(held int) bool
	// renewed records that the session held everything at that time.
	renewed(at time.Time)
	// look makes the next read look for requeued entries.
	look()
	// owns reports whether only this session is served.
	owns() bool
}

func newSession(s *source, name string) *session {
	opened := &session{source: s, group: s.group, name: name, hand: newHand()}
	if s.group.cfg.Ordered {
		opened.reader = &ownerReader{group: s.group, name: name}
	} else {
		opened.reader = &groupReader{group: s.group, name: name}
	}
	return opened
}

// leaseToken returns the token of a session's lease, or "".
func leaseToken(cfg *settings, name string) string {
	if cfg.Ordered {
		return name
	}
	return ""
}

// Start implements driver.Session.
func (s *session) Start(_ context.Context, window int) error {
	if window < 1 || window > maxWindow {
		return fmt.Errorf("inboxredis: a window of %d, from 1 to %d are allowed", window, maxWindow)
	}
	return s.hand.start(window)
}

// Receive implements driver.Session.
func (s *session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	for {
		room, err := s.hand.await(ctx)
		if err != nil {
			return nil, err
		}
		room = min(room, most)
		if ds := s.hand.next(room); len(ds) > 0 {
			return ds, nil
		}
		entries, err := s.read(ctx, room)
		deliveries := make([]*delivery, len(entries))
		for i, e := range entries {
			deliveries[i] = &delivery{place: e.place, session: s, fields: e.fields, redelivered: e.redelivered}
		}
		s.hand.add(deliveries)
		if err != nil {
			s.hand.lose(err)
		}
	}
}

// read requests as many entries as will probably arrive in time.
func (s *session) read(ctx context.Context, most int) ([]entry, error) {
	pages := s.group.pages
	asked := pages.next(most)
	entries, err := s.reader.read(ctx, asked)
	if isTimeout(err) {
		pages.late(asked)
	}
	pages.came(entries)
	return entries, err
}

// Stop implements driver.Session.
func (s *session) Stop(ctx context.Context) error { return s.giveBack(ctx, s.hand.stop()) }

// Close implements driver.Session.
func (s *session) Close(ctx context.Context) error {
	s.hand.lose(errClosed)
	// Entries must be requeued even if ctx has ended.
	err := s.group.leave(context.WithoutCancel(ctx), s.name, leaseToken(s.group.cfg, s.name))
	s.source.closed(s.name, err)
	s.hand.empty()
	return s.group.fault("close the session", err)
}

// renew renews the session's entries in flight.
func (s *session) renew(ctx context.Context) error {
	held, lost := s.hand.held()
	if lost || !s.reader.renews(len(held)) {
		return nil
	}
	began := time.Now()
	switch mine, err := s.pass(ctx, renewTimeout(s.group.cfg), held, s.name, 0); {
	case err != nil:
		return s.group.fault("renew", err)
	case !mine:
		s.hand.lose(errLease)
	default:
		s.reader.renewed(began)
	}
	return nil
}

// renewTimeout leaves time for a second attempt before the entries can be claimed. On a silent connection the
// client times out late.
func renewTimeout(cfg *settings) time.Duration { return min(cfg.Timeout, renewEvery) }

// pass transfers deliveries to a consumer name, with the given idle time. It returns false if another process
// holds the lease.
func (s *session) pass(ctx context.Context, timeout time.Duration, ds []*delivery, to string, idle time.Duration) (bool, error) {
	var ids [2][]any
	for _, d := range ds {
		ids[d.stream] = append(ids[d.stream], d.id)
	}
	args := []any{s.group.cfg.ConsumerConfig.Name, leaseToken(s.group.cfg, s.name), claimIdle.Milliseconds(), s.name, to, idle.Milliseconds(), len(ids[0])}
	args = append(append(args, ids[0]...), ids[1]...)
	answer, err := withinTime(ctx, s.group, timeout, func(ctx context.Context) (int64, error) {
		return holdScript.Run(ctx, s.group.client, s.group.keys.read(), args...).Int64()
	})
	return answer == 1, err
}

// GiveBack implements driver.Session. The next reader that looks for entries without an owner claims them.
func (s *session) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	held := s.hand.have(ds)
	if err := s.giveBack(ctx, held); err != nil {
		return err
	}
	return stale(len(ds) - len(held))
}

func (s *session) giveBack(ctx context.Context, ds []*delivery) error {
	if len(ds) == 0 {
		return nil
	}
	// This comes before the server call, because the next read may find them at once, and add skips entries in the
	// hand.
	s.hand.forget(ds...)
	mine, err := s.pass(ctx, s.group.cfg.Timeout, ds, returned, claimIdle+time.Millisecond)
	if err != nil {
		return s.failed("give messages back", err)
	}
	if !mine {
		return fmt.Errorf("%w: %w", driver.ErrStale, errLease)
	}
	s.reader.look()
	return nil
}

// Ack implements driver.Session. It does not check the owner of an entry: if another consumer has claimed it, that
// one need not process it again.
func (s *session) Ack(ctx context.Context, ds []driver.Delivery, _ bool) error {
	held := s.hand.have(ds)
	var ids [2][]string
	for _, d := range held {
		ids[d.stream] = append(ids[d.stream], d.id)
	}
	if _, err := within(ctx, s.group, func(ctx context.Context) ([]redis.Cmder, error) {
		pipe := s.group.client.Pipeline()
		for stream, key := range s.group.keys.read()[:2] {
			for some := range slices.Chunk(ids[stream], ackAtOnce) {
				pipe.XAck(ctx, key, s.group.cfg.ConsumerConfig.Name, some...)
			}
		}
		return pipe.Exec(ctx)
	}); err != nil {
		return s.failed("acknowledge", err)
	}
	s.hand.forget(held...)
	return stale(len(ds) - len(held))
}

// failed ends the session. Otherwise unsettled entries would stay in its hand and be renewed, and occupy the
// window forever.
func (s *session) failed(what string, err error) error {
	err = s.group.fault(what, err)
	s.hand.lose(err)
	return err
}

// stale returns the error for n deliveries that are no longer in the hand.
func stale(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("inboxredis: %d deliveries: %w", n, driver.ErrStale)
}

// place is the position of an entry: 0 for the stream, 1 for the retries, and its id.
type place struct {
	stream int
	id     string
}

// entry is an entry of a stream, as read.
type entry struct {
	place

	fields      map[string]any
	redelivered bool
}

// delivery is one delivery of an entry.
type delivery struct {
	place

	session     *session
	start       int            // of the session; 0: not delivered yet
	fields      map[string]any // as received
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

// hand has the entries that a session has read and not settled.
type hand struct {
	settled chan struct{} // there may be room

	mu     sync.Mutex
	all    map[place]*delivery
	spare  []*delivery // not delivered yet
	window int         // 0: stopped
	starts int
	out    int   // delivered since the last start and not settled
	lost   error // the error after which nothing is delivered
}

func newHand() *hand { return &hand{settled: make(chan struct{}, 1), all: map[place]*delivery{}} }

func (h *hand) start(window int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.starts++
	h.window, h.out = window, 0
	return h.lost
}

// stop returns the entries that were not delivered.
func (h *hand) stop() []*delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	spare := h.spare
	h.window, h.spare = 0, nil
	return spare
}

// await waits for room in the window, and returns the room.
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

// add adds entries to the hand. It skips entries that are there already: they were claimed because they were not
// renewed for long.
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

// next delivers read entries while there is room.
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

// have returns the deliveries that are still in the hand.
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

// forget removes deliveries from the hand, because they are settled or the session no longer owns them.
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

// held returns the entries in the hand, or nothing if the session is lost.
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

// lose ends the deliveries with an error.
func (h *hand) lose(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = cmp.Or(h.lost, err)
	h.wake()
}

// empty removes all entries.
func (h *hand) empty() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.all)
	h.spare = nil
}

// wake makes await check again.
func (h *hand) wake() {
	select {
	case h.settled <- struct{}{}:
	default:
	}
}

package joined

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

var errClosed = errors.New("the session is closed")

// session is a driver.Session of one session of each part. While the context of a Receive lasts
// a goroutine receives for each part, as far ahead as its share of the window.
type session struct {
	source  *Source
	settles bool // Move ends the original
	parts   []*part
	change  chan struct{} // something has come, there is room, or a part has ended

	pumping sync.WaitGroup
	pumps   context.Context // of the goroutines; nil: there are none
	end     context.CancelFunc

	mu     sync.Mutex
	window int // 0: stopped
	starts int
	out    int   // handed out since the last start and not settled
	turn   int   // the part that is looked at first
	lost   error // why nothing is delivered any more
}

// part is one of the sessions.
type part struct {
	driver.Session

	ahead []driver.Delivery // received and not handed out; guarded by the session's lock
	empty chan struct{}     // all ahead was handed out
}

// delivery is one of a part's.
type delivery struct {
	driver.Delivery

	session *session
	part    int
	start   int  // of the session, when it was handed out
	settled bool // guarded by the session's lock
}

func newSession(source *Source, parts []driver.Session) *session {
	s := &session{source: source, settles: source.Traits().MoveSettles, change: make(chan struct{}, 1)}
	for _, p := range parts {
		s.parts = append(s.parts, &part{Session: p, empty: make(chan struct{}, 1)})
	}
	return s
}

// Start implements driver.Session. Each part has the whole window: all messages may be of one.
func (s *session) Start(ctx context.Context, window int) error {
	s.halt()
	err := s.every(func(p *part) error { return p.Start(ctx, window) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.window, s.out, s.starts = window, 0, s.starts+1
	return nil
}

// flow has the pumps run until ctx ends, unless they run.
func (s *session) flow(ctx context.Context) {
	if s.pumps != nil && s.pumps.Err() == nil {
		return
	}
	s.halt()
	s.mu.Lock()
	share := max(1, s.window/len(s.parts))
	s.mu.Unlock()
	pumps, end := context.WithCancel(ctx)
	s.pumps, s.end = pumps, end
	for _, p := range s.parts {
		s.pumping.Go(func() { s.pump(pumps, p, share) })
	}
}

// halt ends the pumps. What they have ahead stays there.
func (s *session) halt() {
	if s.pumps != nil {
		s.end()
		s.pumping.Wait()
		s.pumps = nil
	}
}

// pump receives of one part until ctx ends. It goes on when what it has is handed out.
func (s *session) pump(ctx context.Context, p *part, most int) {
	for {
		ds, err := p.Receive(ctx, most)
		if ctx.Err() != nil {
			err = nil
		}
		s.mu.Lock()
		p.ahead = append(p.ahead, ds...)
		s.lost = cmp.Or(s.lost, err)
		held := len(p.ahead) > 0
		s.mu.Unlock()
		s.wake()
		switch {
		case err != nil || ctx.Err() != nil:
			return
		case held:
			select {
			case <-p.empty:
			case <-ctx.Done():
				return
			}
		}
	}
}

// Receive implements driver.Session. The pumps end with ctx: a part that has nothing yet must not
// take a partition for a consumer that is about to end.
func (s *session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	for {
		s.flow(ctx)
		if ds, err := s.next(most); len(ds) > 0 || err != nil {
			return ds, err
		}
		select {
		case <-ctx.Done():
			s.halt()
			return nil, ctx.Err()
		case <-s.pumps.Done(): // they were an earlier call's
		case <-s.change:
		}
	}
}

// next hands out what has come, as far as there is room. Another part is the first one each time.
func (s *session) next(most int) ([]driver.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != nil {
		return nil, s.lost
	}
	var ds []driver.Delivery
	room := min(most, s.window-s.out)
	for k := range s.parts {
		i := (s.turn + k) % len(s.parts)
		p := s.parts[i]
		n := min(max(room, 0), len(p.ahead))
		for _, d := range p.ahead[:n] {
			ds = append(ds, &delivery{Delivery: d, session: s, part: i, start: s.starts})
		}
		room, s.out = room-n, s.out+n
		if p.ahead = p.ahead[n:]; n > 0 && len(p.ahead) == 0 {
			p.ahead = nil
			signal(p.empty)
		}
	}
	s.turn = (s.turn + 1) % len(s.parts)
	return ds, nil
}

// Ack implements driver.Session.
func (s *session) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	return s.settle(ds, func(p *part, own []driver.Delivery) error { return p.Ack(ctx, own, mayWait) })
}

// GiveBack implements driver.Session.
func (s *session) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	return s.settle(ds, func(p *part, own []driver.Delivery) error { return p.GiveBack(ctx, own) })
}

// settle has each part settle its own.
func (s *session) settle(ds []driver.Delivery, do func(*part, []driver.Delivery) error) error {
	own, mine := make([][]driver.Delivery, len(s.parts)), make([]*delivery, 0, len(ds))
	for _, one := range ds {
		if d, ok := one.(*delivery); ok && d.session == s {
			own[d.part], mine = append(own[d.part], d.Delivery), append(mine, d)
		}
	}
	err := among(own, func(i int) error { return do(s.parts[i], own[i]) })
	if err != nil && !errors.Is(err, driver.ErrStale) {
		return err
	}
	s.done(mine...)
	if len(mine) < len(ds) {
		err = cmp.Or(err, fmt.Errorf("%d deliveries: %w", len(ds)-len(mine), driver.ErrStale))
	}
	return err
}

// moved notes that a delivery is settled, where a move does that.
func (s *session) moved(d *delivery, err error) {
	if s.settles && (err == nil || errors.Is(err, driver.ErrStale)) {
		s.done(d)
	}
}

// done makes room for others.
func (s *session) done(ds ...*delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		if !d.settled && d.start == s.starts {
			s.out--
		}
		d.settled = true
	}
	s.wake()
}

// Stop implements driver.Session.
func (s *session) Stop(ctx context.Context) error {
	s.halt()
	s.mu.Lock()
	s.window = 0
	ahead := make(map[*part][]driver.Delivery, len(s.parts))
	for _, p := range s.parts {
		ahead[p], p.ahead = p.ahead, nil
	}
	s.mu.Unlock()
	return s.every(func(p *part) error {
		if err := p.Stop(ctx); err != nil || len(ahead[p]) == 0 {
			return err
		}
		return p.GiveBack(ctx, ahead[p])
	})
}

// Close implements driver.Session.
func (s *session) Close(ctx context.Context) error {
	s.halt()
	s.mu.Lock()
	s.lost = cmp.Or(s.lost, errClosed)
	s.mu.Unlock()
	return s.every(func(p *part) error { return p.Close(ctx) })
}

// every calls do for all parts at once.
func (s *session) every(do func(*part) error) error {
	return each(len(s.parts), func(i int) error { return do(s.parts[i]) })
}

func (s *session) wake() { signal(s.change) }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is there already
	}
}

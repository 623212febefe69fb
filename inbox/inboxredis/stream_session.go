package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

var (
	errClosed = errors.New("inboxredis: the session is closed")
	errLease  = errors.New("inboxredis: another process serves the stream now")
)

// ackAtOnce is how many ids one command acknowledges.
const ackAtOnce = 1000

// session is driver.Session.
type session struct {
	source *source
	group  *group
	name   string // the consumer name; of ordered consumers also the token of the lease
	hand   *hand
	reader reader
}

// reader takes entries from the server.
type reader interface {
	// read waits up to a second for entries, and returns at most so many, or so many of each stream.
	read(ctx context.Context, most int) ([]entry, error)
	// renews reports whether the server must hear of a session that holds so many.
	renews(held int) bool
	// renewed learns that all was still the session's at that time.
	renewed(at time.Time)
	// look has the next read look for what was given back.
	look()
	// owns reports whether the stream is served to this session alone.
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

// leaseToken is that of a session; "" without a lease.
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

// read asks for as much as is likely to come in time.
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
	// A context that has ended must not keep the entries from others.
	err := s.group.leave(context.WithoutCancel(ctx), s.name, leaseToken(s.group.cfg, s.name))
	s.source.closed(s.name, err)
	s.hand.empty()
	return s.group.fault("close the session", err)
}

// renew tells the server what is in work here.
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

// renewTimeout leaves time for another try before the entries are anybody's: where the first one's
// connection has fallen silent the client minds that late.
func renewTimeout(cfg *settings) time.Duration { return min(cfg.Timeout, renewEvery) }

// pass hands deliveries to a consumer name, where they are idle for so long already. It is false
// when the lease is another's.
func (s *session) pass(ctx context.Context, timeout time.Duration, ds []*delivery, to string, idle time.Duration) (bool, error) {
	var ids [2][]any
	for _, d := range ds {
		ids[d.stream] = append(ids[d.stream], d.id)
	}
	args := []any{s.group.cfg.Group, leaseToken(s.group.cfg, s.name), claimIdle.Milliseconds(), s.name, to, idle.Milliseconds(), len(ids[0])}
	args = append(append(args, ids[0]...), ids[1]...)
	answer, err := withinTime(ctx, s.group, timeout, func(ctx context.Context) (int64, error) {
		return holdScript.Run(ctx, s.group.client, s.group.keys.read(), args...).Int64()
	})
	return answer == 1, err
}

// GiveBack implements driver.Session. The next to look for what has no owner takes it.
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
	// Before the server knows: the next read may find them at once, and what is in the hand is passed over.
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

// Ack implements driver.Session. It does not ask whose an entry in the hand is: who has claimed it
// need not process it again.
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
				pipe.XAck(ctx, key, s.group.cfg.Group, some...)
			}
		}
		return pipe.Exec(ctx)
	}); err != nil {
		return s.failed("acknowledge", err)
	}
	s.hand.forget(held...)
	return stale(len(ds) - len(held))
}

// failed ends the session: what was not settled would stay in its hand and be renewed, and its place
// in the window be taken for good.
func (s *session) failed(what string, err error) error {
	err = s.group.fault(what, err)
	s.hand.lose(err)
	return err
}

// stale is about so many deliveries that are no longer in the hand.
func stale(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("inboxredis: %d deliveries: %w", n, driver.ErrStale)
}

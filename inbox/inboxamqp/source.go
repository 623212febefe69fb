package inboxamqp

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// maxWindow is the largest prefetch that quorum queues allow.
const maxWindow = 2000

// source is a queue that implements driver.Source. It receives on one connection for each session, and publishes
// copies on another.
type source struct {
	cfg     *settings
	queue   string // that it reads
	dial    amqpconn.Dial
	silence *silence
	copies  *copier
	passing *passing
}

var (
	_ driver.Source = (*source)(nil)
	_ driver.Keeper = (*source)(nil)
)

func newSource(dial amqpconn.Dial, cfg *settings) *source {
	copies := newCopier(dial, cfg)
	return &source{cfg: cfg, queue: cfg.queue, dial: dial, silence: &silence{}, copies: copies, passing: newPassing(copies)}
}

// of returns a source of another queue that shares this source's copier.
func (s *source) of(queue string) *source {
	other := *s
	other.queue = queue
	return &other
}

// Traits implements driver.Source.
func (s *source) Traits() driver.Traits {
	return s.cfg.traits()
}

// DeadLetters implements driver.Keeper.
func (s *source) DeadLetters() driver.DeadLetters { return newLetters(s.dial, s.cfg) }

// Open implements driver.Source: it dials, and checks that the queue exists.
func (s *source) Open(ctx context.Context) (driver.Session, error) {
	opened, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	return opened, nil
}

func (s *source) open(ctx context.Context) (*session, error) {
	conn, err := amqpconn.Open(ctx, s.dial, s.cfg.Timeout)
	if err != nil {
		return nil, err
	}
	release := bound(ctx, conn)
	opened, err := s.attach(conn)
	release()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return opened, nil
}

// bound closes the connection, which ends a running call, if ctx ends before the release.
func bound(ctx context.Context, conn *amqpconn.Conn) (release func() bool) {
	return context.AfterFunc(ctx, conn.Close)
}

// attach starts a session on a connection.
func (s *source) attach(conn *amqpconn.Conn) (*session, error) {
	if err := conn.Watch(s.silence.pending); err != nil {
		return nil, err
	}
	if s.cfg.partitioned() {
		if err := s.cfg.missingExchange(conn); err != nil {
			return nil, err
		}
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	exists, err := conn.QueueExists(s.queue)
	if err != nil {
		return nil, fmt.Errorf("look for queue %q: %w", s.queue, err)
	}
	if !exists {
		return nil, s.missing()
	}
	if err := s.rebind(conn); err != nil {
		return nil, err
	}
	return newSession(s, conn, ch), nil
}

// rebind binds the queue for returning messages, in case it was declared again without Setup. It does nothing if
// the user lacks the permission, or if Setup was never called.
func (s *source) rebind(conn *amqpconn.Conn) error {
	err := bindReturn(conn, s.queue)
	switch {
	case amqpconn.IsRefused(err):
		s.cfg.Logger.Info("queue not bound for retries: permission missing", slog.String("exchange", returnExchange), slog.Any("error", err))
		return nil
	case amqpconn.IsNotFound(err):
		return nil
	}
	return err
}

func (s *source) missing() error {
	return fmt.Errorf("queue %q: declare it, or call Consumer.Setup: %w", s.queue, driver.ErrMissing)
}

// Run implements driver.Source: it keeps the connection for copies open. It also continues the wait of messages
// whose delay is longer than the longest delay queue.
func (s *source) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() { s.passing.run(ctx) })
	s.copies.publisher.Run(ctx)
	running.Wait()
}

// Ready implements driver.Source.
func (s *source) Ready(context.Context) error {
	if err := s.copies.publisher.Ready(); err != nil {
		return fmt.Errorf("publishing copies: %w", err)
	}
	return s.passing.refused(time.Now())
}

// Move implements driver.Source. The copies are published together; each is mandatory, persistent and confirmed.
// Move makes no copy of a message whose session has ended: the broker delivers the original again, so there would
// be two.
func (s *source) Move(ctx context.Context, moves []driver.Move) []error {
	results := make([]error, len(moves))
	outs := make([]*outgoing, 0, len(moves))
	at := make([]int, 0, len(moves))
	for i, m := range moves {
		d, ok := m.Delivery.(*delivery)
		if !ok || d.session.gone() {
			results[i] = driver.ErrStale
			continue
		}
		outs, at = append(outs, s.copies.outgoing(d, m)), append(at, i)
	}
	s.copies.publish(ctx, outs)
	for k, out := range outs {
		results[at[k]] = out.result()
	}
	return results
}

// maxSlack bounds the additional bytes that silent connections may add to the patience of later connections.
const maxSlack = 128 << 20

// silence computes how long a broker may be silent, from the bytes that may be in transit.
type silence struct {
	largest atomic.Int64 // largest body received, in bytes
	slack   atomic.Int64 // more bytes that may be in transit
}

// pending returns how many bytes may be in transit from the broker before it answers a request.
func (s *silence) pending() int { return int(2*s.largest.Load() + s.slack.Load()) }

// received records the size of a body.
func (s *silence) received(size int) {
	if int64(size) > s.largest.Load() {
		s.largest.Store(int64(size))
	}
}

// note gives the next connection more time if nothing arrived on this one before the broker seemed silent. The
// broker may have been sending a large message over a slow line; with the same patience it would never arrive.
func (s *silence) note(silent bool) {
	if !silent {
		s.slack.Store(0)
		return
	}
	s.slack.Store(min(2*s.slack.Load()+driver.MaxBodyBytes, maxSlack))
}

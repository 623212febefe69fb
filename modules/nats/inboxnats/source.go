package inboxnats

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	maxWindow = 2000
	// ackWait is the time without a sign of life after which the server redelivers a message. An existing durable
	// consumer may have another one.
	ackWait = 8 * time.Second
	// renewals is the number of signs of life within ackWait.
	renewals = 4
	// tailDelay is the delay of a message that goes behind the others, because retries come first.
	tailDelay = time.Second
)

// errNotRunning is the error of a call that needs Run, which renews messages in flight.
var errNotRunning = fmt.Errorf("inboxnats: not running: %w", driver.ErrUnavailable)

// source implements driver.Source for a stream or one of its partitions.
type source struct {
	*settings
	places
	name string // of this process in leases

	running atomic.Bool

	mu      sync.Mutex
	session *session // nil between sessions
}

func newSource(s *settings, p places) *source {
	return &source{settings: s, places: p, name: rand.Text()[:10]}
}

// Traits implements driver.Source.
func (s *source) Traits() driver.Traits {
	return driver.Traits{System: "nats", MaxWindow: maxWindow, Exclusive: s.Ordered}
}

// Open implements driver.Source.
func (s *source) Open(ctx context.Context) (driver.Session, error) {
	opened := &session{source: s, hand: newHand(), wait: ackWait}
	for i, stream := range []string{s.stream, s.retries} {
		info, err := s.info(ctx, stream)
		if err != nil {
			return nil, err
		}
		opened.wait = min(opened.wait, info.Config.AckWait)
		opened.feeds[i] = &feed{session: opened, stream: stream, retries: i == 1}
	}
	if s.Ordered {
		opened.lease = &lease{source: s}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = opened
	return opened, nil
}

// info asks the server for the durable consumer of a stream.
func (s *source) info(ctx context.Context, stream string) (info *jetstream.ConsumerInfo, err error) {
	err = s.call(ctx, "consumer "+s.consumer+" of stream "+stream, func(ctx context.Context) error {
		c, err := s.js.Consumer(ctx, stream, s.consumer)
		if err == nil {
			info = c.CachedInfo()
		}
		return err
	})
	return info, err
}

// current returns the session, or nil between sessions.
func (s *source) current() *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session
}

func (s *source) closed(over *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == over {
		s.session = nil
	}
}

// Run implements driver.Source: it renews the messages in flight.
func (s *source) Run(ctx context.Context) {
	s.running.Store(true)
	defer s.running.Store(false)
	wait := ackWait
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait / renewals):
		}
		if current := s.current(); current != nil {
			wait = current.wait
			current.renew(ctx)
		}
	}
}

// Served implements Source of package group: it reports whether this process holds the lease.
func (s *source) Served() bool {
	current := s.current()
	return current != nil && current.lease != nil && current.lease.lasts()
}

// Ready implements driver.Source.
func (s *source) Ready(ctx context.Context) error {
	if !s.running.Load() {
		return errNotRunning
	}
	_, err := s.stat(ctx, s.retries)
	return err
}

// stat asks the server for a stream and the number of messages on each subject that a filter matches.
func (s *source) stat(ctx context.Context, stream string, filter ...string) (info *jetstream.StreamInfo, err error) {
	err = s.call(ctx, "stream "+stream, func(ctx context.Context) error {
		found, err := s.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		info = found.CachedInfo()
		if len(filter) > 0 {
			info, err = found.Info(ctx, jetstream.WithSubjectFilter(filter[0]))
		}
		return err
	})
	return info, err
}

// DeadLetters implements driver.Keeper.
func (s *source) DeadLetters() driver.DeadLetters { return &letters{s} }

// Backlog implements driver.Measured. Of the unsettled messages it knows only those of this process.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	held := map[string]int{}
	if current := s.current(); current != nil {
		held = current.hand.bySubject()
	}
	info, err := s.info(ctx, s.stream)
	if errors.Is(err, driver.ErrMissing) {
		return b, nil
	}
	if err != nil {
		return b, err
	}
	b.Waiting = max(int(info.NumPending)+info.NumAckPending-held[s.stream], 0)
	retries, err := s.stat(ctx, s.retries, s.later[:len(s.later)-len("later")]+"*")
	if err != nil {
		return b, err
	}
	b.Retrying = max(int(retries.State.Subjects[s.later])-held[s.later], 0)
	b.PutOff = max(int(retries.State.Subjects[s.putOff])-held[s.putOff], 0)
	return b, nil
}

// Move implements driver.Source. The copy's Nats-Msg-Id names the original, so that the server drops a second copy.
func (s *source) Move(ctx context.Context, moves []driver.Move) []error {
	results := make([]error, len(moves))
	if !s.running.Load() {
		for i := range results {
			results[i] = errNotRunning
		}
		return results
	}
	sent, ready := make([]jetstream.PubAckFuture, len(moves)), sync.OnceValue(func() bool { return s.Ready(ctx) == nil })
	for i, m := range moves {
		sent[i], results[i] = s.send(s.copyOf(m))
	}
	for i, m := range moves {
		results[i] = s.stored(ctx, sent[i], results[i])
		if isTooLarge(results[i]) {
			slim := s.copyOf(m)
			slim.slim()
			again, err := s.send(slim)
			results[i] = s.stored(ctx, again, err)
		}
		results[i] = classify(results[i], ready)
	}
	return results
}

// send publishes a copy. Without a connection it fails, because the client would send the copy when nobody waits for
// it.
func (s *source) send(c *copied) (jetstream.PubAckFuture, error) {
	if !s.conn.IsConnected() {
		return nil, nats.ErrDisconnected
	}
	return s.js.PublishMsgAsync(c.msg())
}

// stored waits until a copy is stored.
func (s *source) stored(ctx context.Context, sent jetstream.PubAckFuture, err error) error {
	if err != nil {
		return err
	}
	select {
	case <-sent.Ok():
		return nil
	case err := <-sent.Err():
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func isTooLarge(err error) bool {
	answer, ok := errors.AsType[jetstream.JetStreamError](err)
	tooLarge := ok && answer.APIError() != nil && (answer.APIError().ErrorCode == 10054 || answer.APIError().ErrorCode == 10097)
	return tooLarge || errors.Is(err, nats.ErrMaxPayload)
}

// classify maps the error of a move to the errors of driver.Source. An error that is not an answer of JetStream is a
// network fault. Ready reports whether JetStream answers: then no stream takes the subject.
func classify(err error, ready func() bool) error {
	if err == nil {
		return nil
	}
	class := driver.ErrUnavailable
	answer, ok := errors.AsType[jetstream.JetStreamError](err)
	switch {
	case isTooLarge(err):
		class = driver.ErrTooLarge
	case ok && answer.APIError() != nil && answer.APIError().Code < 500, errors.Is(err, jetstream.ErrNoStreamResponse) && ready():
		class = driver.ErrRefused
	case ok && answer.APIError() != nil && answer.APIError().ErrorCode == 10077: // the stream is full
		class = driver.ErrRefused
	}
	return fmt.Errorf("inboxnats: move: %w: %w", class, err)
}

// warn logs a failure between sessions.
func (s *source) warn(ctx context.Context, message string, err error) {
	if err != nil && ctx.Err() == nil {
		s.log.WarnContext(ctx, message, slog.String("queue", s.queue), slog.Any("error", err))
	}
}

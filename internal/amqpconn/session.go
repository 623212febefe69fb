package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
)

// session is a connection with its publishing channels, which share the places for unconfirmed
// messages. A channel that the broker has closed over a message is replaced; when anything else
// fails, all of it ends together.
type session struct {
	p     *Publisher
	conn  *Conn
	facts *facts
	slots chan struct{} // taken by unconfirmed messages

	mu      sync.Mutex
	windows []*window
	refused error // why the broker has closed the connection, if that was over a message
}

// openSession opens the channels. The end of ctx ends it, and so the connection.
func openSession(ctx context.Context, conn *Conn, p *Publisher) (*session, error) {
	stop := context.AfterFunc(ctx, conn.Close)
	defer stop()
	s := &session{p: p, conn: conn, facts: newFacts(conn), slots: make(chan struct{}, p.cfg.Window)}
	if err := conn.Watch(s.pending); err != nil {
		return nil, err
	}
	for range p.cfg.Channels {
		w, err := openWindow(s)
		if err != nil {
			return nil, err
		}
		s.put(len(s.windows), w)
	}
	return s, nil
}

func (s *session) put(i int, w *window) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i == len(s.windows) {
		s.windows = append(s.windows, nil)
	}
	s.windows[i] = w
}

func (s *session) at(i int) *window {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.windows[i]
}

// pending returns how many bytes of bodies are not confirmed.
func (s *session) pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := 0
	for _, w := range s.windows {
		size += w.pending()
	}
	return size
}

// run serves all channels until one fails for good or ctx is cancelled and all windows are empty.
func (s *session) run(ctx context.Context, stop func()) error {
	var running sync.WaitGroup
	var once sync.Once
	var first error
	for i := range s.windows {
		running.Go(func() {
			err := s.serve(ctx, i, stop)
			once.Do(func() { first = err })
		})
	}
	running.Wait()
	if s.refused != nil {
		return fmt.Errorf("%w: %w", errRefused, s.refused)
	}
	return first
}

// serve runs one window after the other, each in the place of one whose channel the broker has
// closed over a message. Messages that were on their way there and are not to blame are published again.
func (s *session) serve(ctx context.Context, i int, stop func()) error {
	for {
		w := s.at(i)
		err := w.run(ctx, stop)
		replaceable := w.replaceable()
		rest := w.clear()
		if !replaceable {
			s.note(w, err)
			s.p.publishAgain(rest)
			return err
		}
		if repeats, ok := s.p.refusals.Due(); ok {
			s.p.cfg.Logger.WarnContext(ctx, "RabbitMQ refuses a message", slog.Any("error", err), slog.Int("repeats", repeats))
		}
		next, err := openWindow(s)
		if err == nil {
			s.put(i, next)
			close(w.replaced)
		} else {
			s.conn.Close()
		}
		s.p.publishAgain(rest)
		if err != nil {
			return err
		}
	}
}

// note remembers that the broker has closed the whole connection over a message.
func (s *session) note(w *window, err error) {
	if !w.verdict.overMessage() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
}

// publish places a message in its window. The error is errRefused if the session is ending over
// another message.
func (s *session) publish(e *entry) error {
	if err := s.facts.check(e.ctx, e.out); err != nil {
		return err
	}
	for {
		w := s.at(int(e.out.Stripe % uint32(s.p.cfg.Channels)))
		if err := w.admit(e); !errors.Is(err, errEnded) {
			return err
		}
		if err := s.awaitSuccessor(e.ctx, w); err != nil {
			return err
		}
	}
}

// awaitSuccessor waits until a window that has ended is replaced.
func (s *session) awaitSuccessor(ctx context.Context, w *window) error {
	if !w.verdict.overMessage() {
		return unavailable(w.verdict.err)
	}
	select {
	case <-w.replaced:
		return nil
	case <-s.conn.Done():
		return errRefused
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
}

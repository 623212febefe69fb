package amqpconn

import (
	"context"
	"sync"
)

// session is a connection with its publishing channels. They begin and end together, and
// share the places for unconfirmed messages.
type session struct {
	conn    *Conn
	windows []*window
	slots   chan struct{} // taken by unconfirmed messages
}

func openSession(conn *Conn, cfg PublisherConfig, doubted *suspects) (*session, error) {
	s := &session{conn: conn, slots: make(chan struct{}, cfg.Window)}
	known := newExchanges(conn)
	for range cfg.Channels {
		w, err := openWindow(conn, cfg, known, doubted, s.slots)
		if err != nil {
			return nil, err
		}
		s.windows = append(s.windows, w)
	}
	return s, nil
}

func (s *session) window(out Out) *window { return s.windows[out.Stripe%uint32(len(s.windows))] }

// run serves all windows. The first that fails closes the connection, which ends the others;
// its error is returned.
func (s *session) run(ctx context.Context, stop func()) error {
	var running sync.WaitGroup
	var once sync.Once
	var first error
	fail := func(err error) {
		once.Do(func() { first = err })
		s.conn.Close()
	}
	for _, w := range s.windows {
		running.Go(func() { w.run(ctx, stop, fail) })
	}
	running.Wait()
	return first
}

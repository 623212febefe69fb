package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// window is one publishing channel of a session. The client puts confirms back
// into the order of publishing and takes the broker's "multiple" apart, so the
// window is a queue: every confirm belongs to its head. The client forgets a
// nack that came early when a later ack is a "multiple", so whether the message
// was acked is read from its own answer.
type window struct {
	cfg      PublisherConfig
	conn     *Conn
	ch       *amqp.Channel
	facts    *facts
	suspects *suspects

	confirms <-chan amqp.Confirmation
	answers  chan *amqp.DeferredConfirmation // of the published messages, in their order
	returns  <-chan amqp.Return
	closes   <-chan *amqp.Error

	slots    chan struct{} // shared by the windows of a session
	out      chan *entry   // to the writer; never full, for an entry in it holds a slot
	broken   chan struct{} // closed when the writer has failed
	dead     chan struct{} // closed when the window has ended
	replaced chan struct{} // closed when another window has taken its place
	opened   time.Time
	nacked   bool // a queue has refused a message; of the goroutine that listens

	mu      sync.Mutex
	queue   []*entry
	ended   bool
	verdict verdict   // once it has ended
	rest    []*entry  // to publish again elsewhere
	writing time.Time // when the write under way began; zero: there is none
	blocked time.Time // when the broker was last seen to block
}

var errEnded = errors.New("the window has ended")

// openWindow opens a channel in confirm mode. The listeners hold a whole window,
// so the client never waits for us while it reads from the connection.
func openWindow(s *session) (*window, error) {
	conn, size := s.conn, s.p.cfg.Window
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	if err := conn.Within(func() error { return ch.Confirm(false) }); err != nil {
		return nil, fmt.Errorf("confirm mode: %w", err)
	}
	return &window{
		cfg: s.p.cfg, conn: conn, ch: ch, facts: s.facts, suspects: s.p.suspects,
		confirms: ch.NotifyPublish(make(chan amqp.Confirmation, size)),
		answers:  make(chan *amqp.DeferredConfirmation, size),
		returns:  ch.NotifyReturn(make(chan amqp.Return, size)),
		closes:   ch.NotifyClose(make(chan *amqp.Error, 1)),
		slots:    s.slots,
		out:      make(chan *entry, size),
		broken:   make(chan struct{}),
		dead:     make(chan struct{}),
		replaced: make(chan struct{}),
		opened:   time.Now(),
	}, nil
}

// run serves the window until it fails, or until ctx is cancelled and the window is empty. When the
// broker has refused a message the connection is left as it is, and else closed. Stop is called
// when ctx is cancelled.
func (w *window) run(ctx context.Context, stop func()) error {
	written := make(chan struct{})
	go func() {
		defer close(written)
		w.write()
	}()
	err := w.listen(ctx, stop)
	w.drainConfirms()
	w.end(err)
	if err != nil && !w.replaceable() {
		w.conn.Close() // ends a write in progress
	}
	select {
	case <-written:
	case <-time.After(closePatience):
		w.conn.Close()
		// The client may be stuck in a write on a connection it has given up itself.
		w.settleAll()
	}
	return err
}

// replaceable reports whether the window has ended because the broker refused a message, on a
// connection that is still good.
func (w *window) replaceable() bool { return w.verdict.overMessage() && !w.conn.raw.IsClosed() }

// write is the only goroutine that publishes on the channel. It ends with the window, or when it
// cannot write any more.
func (w *window) write() {
	for {
		select {
		case <-w.dead:
			return
		case e := <-w.out:
			if !w.beginWrite(e) {
				continue
			}
			answer, err := w.ch.PublishWithDeferredConfirm(e.out.Exchange, e.out.Key, true, false, e.out.Message)
			if err == nil {
				w.answers <- answer // as many places as messages may be unconfirmed
			}
			w.endWrite(e, err == nil)
			if err != nil {
				close(w.broken)
				return
			}
		}
	}
}

// listen handles what the broker answers.
func (w *window) listen(ctx context.Context, stop func()) error {
	watch := time.NewTicker(min(max(w.cfg.ConfirmTimeout/8, time.Millisecond), 250*time.Millisecond))
	defer watch.Stop()
	cancelled := ctx.Done() // nil for a context that cannot end
	stopping := false
	var grace <-chan time.Time
	for {
		if stopping && w.empty() {
			return nil
		}
		select {
		case _, open := <-w.confirms:
			if !open {
				return w.cause()
			}
			w.confirmed()
		case <-w.broken:
			return w.cause()
		case <-w.conn.Done():
			return w.cause()
		case now := <-watch.C:
			if err := w.expire(now); err != nil {
				return err
			}
			if w.outdated(now) {
				return errRefused
			}
		case <-cancelled:
			cancelled, stopping = nil, true
			stop()
			timer := time.NewTimer(w.cfg.ShutdownTimeout)
			defer timer.Stop()
			grace = timer.C
		case <-grace:
			return errors.New("confirms missing at shutdown")
		}
	}
}

// nackedFor is how long a window lives that a queue has refused a message in.
const nackedFor = 15 * time.Second

// outdated reports whether another window may fare better: RabbitMQ tells the publishers of a quorum
// queue that it is full, but not that its limit was removed since, and goes on refusing for them what it
// takes from others. Nothing is on its way that would be lost.
func (w *window) outdated(now time.Time) bool {
	return w.nacked && len(w.slots) == 0 && now.Sub(w.opened) > nackedFor
}

// drainConfirms takes what the broker confirmed before the session ended.
func (w *window) drainConfirms() {
	for {
		select {
		case _, open := <-w.confirms:
			if !open {
				return
			}
			w.confirmed()
		default:
			return
		}
	}
}

// cause tells why the channel has ended. The client may know that it has before it tells why.
func (w *window) cause() error {
	patience, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	select {
	case err := <-w.closes:
		if reply, ok := refused(err); ok {
			return reply
		}
	case <-w.conn.Done():
	case <-patience.Done():
	}
	select {
	case <-w.conn.Done():
		return w.conn.Err()
	case <-patience.Done():
		return amqp.ErrClosed
	}
}

// confirmed settles the head. A return arrives before its confirm, and is in
// the buffer by then.
func (w *window) confirmed() {
	ack := w.acked()
	w.collectReturns()
	e, answer := w.takeHead()
	if e != nil {
		w.suspects.clear(e.out)
	}
	switch {
	case answer == nil: // it was given up before
	case e.returned != "":
		answer(fmt.Errorf("%w: %s", ErrUnroutable, e.returned))
	case !ack:
		w.nacked = true
		answer(ErrNacked)
	default:
		answer(nil)
	}
}

// acked reports whether the broker took the head. The confirm may come before the writer has
// passed the answer on.
func (w *window) acked() bool {
	select {
	case answer := <-w.answers:
		return answer.Acked()
	default:
	}
	select {
	case answer := <-w.answers:
		return answer.Acked()
	case <-w.broken: // the write failed
		return false
	}
}

func (w *window) collectReturns() {
	for {
		select {
		case r, open := <-w.returns:
			if !open {
				return
			}
			w.markReturned(r)
		default:
			return
		}
	}
}

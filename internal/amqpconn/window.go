package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// blockedInterval is how often those who wait for a place look whether the broker has
// blocked the connection: it then frees none, for as long as its alarm lasts.
const blockedInterval = 250 * time.Millisecond

// window is one publishing channel of a session. The client puts confirms back
// into the order of publishing and takes the broker's "multiple" apart, so the
// window is a queue: every confirm belongs to its head. The client forgets a
// nack that came early when a later ack is a "multiple", so whether the message
// was acked is read from its own answer.
type window struct {
	cfg       PublisherConfig
	conn      *Conn
	ch        *amqp.Channel
	exchanges *exchanges
	suspects  *suspects

	confirms <-chan amqp.Confirmation
	answers  chan *amqp.DeferredConfirmation // of the published messages, in their order
	returns  <-chan amqp.Return
	closes   <-chan *amqp.Error

	slots chan struct{} // shared by the windows of a session
	out   chan *entry   // to the writer; never full, for an entry in it holds a slot
	dead  chan struct{}

	mu      sync.Mutex
	queue   []*entry
	ended   error // set when the session is over
	writing time.Time
	blocked time.Time // when the broker was last seen to block
}

// openWindow opens a channel in confirm mode. The listeners hold a whole window,
// so the client never waits for us while it reads from the connection.
func openWindow(conn *Conn, cfg PublisherConfig, known *exchanges, doubted *suspects, slots chan struct{}) (*window, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	if err := conn.Within(func() error { return ch.Confirm(false) }); err != nil {
		return nil, fmt.Errorf("confirm mode: %w", err)
	}
	return &window{
		cfg: cfg, conn: conn, ch: ch, exchanges: known, suspects: doubted,
		confirms: ch.NotifyPublish(make(chan amqp.Confirmation, cfg.Window)),
		answers:  make(chan *amqp.DeferredConfirmation, cfg.Window),
		returns:  ch.NotifyReturn(make(chan amqp.Return, cfg.Window)),
		closes:   ch.NotifyClose(make(chan *amqp.Error, 1)),
		slots:    slots,
		out:      make(chan *entry, cfg.Window),
		dead:     make(chan struct{}),
	}, nil
}

// run serves the window until it fails, or until ctx is cancelled and the window is empty.
// Stop is called when ctx is cancelled; fail is called with a failure, and closes the connection.
func (w *window) run(ctx context.Context, stop func(), fail func(error)) {
	written := make(chan struct{})
	go func() {
		defer close(written)
		w.write()
	}()
	err := w.listen(ctx, stop)
	w.drainConfirms()
	w.end(err)
	if err != nil {
		fail(err) // ends a write in progress
	}
	select {
	case <-written:
	case <-time.After(closePatience):
		// The client is stuck in a write on a connection it has given up itself.
		w.abandon()
	}
}

// write is the only goroutine that publishes on the channel.
func (w *window) write() {
	for {
		select {
		case <-w.dead:
			return
		case e := <-w.out:
			if !w.begin(e) {
				continue
			}
			answer, err := w.ch.PublishWithDeferredConfirm(e.out.Exchange, e.out.Key, true, false, e.out.Message)
			if err != nil {
				w.end(err)
			} else {
				w.answers <- answer // as many places as messages may be unconfirmed
			}
			w.wrote(e)
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
		case <-w.dead: // the writer failed
			return w.cause()
		case <-w.conn.Done():
			return w.cause()
		case now := <-watch.C:
			if err := w.expire(now); err != nil {
				return err
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

// cause tells why the channel has ended, as well as the client knows.
func (w *window) cause() error {
	select {
	case err, open := <-w.closes:
		if open {
			return err
		}
	default:
	}
	select {
	case <-w.conn.Done():
		return w.conn.Err()
	default:
		return amqp.ErrClosed
	}
}

// reserve waits for a free place, for all of them if the message is a suspect, unless the broker has
// blocked the connection. It returns how many it took.
func (w *window) reserve(ctx context.Context, out Out) (int, error) {
	if !w.suspects.has(out) {
		return 1, w.place(ctx)
	}
	w.suspects.alone.Lock()
	defer w.suspects.alone.Unlock()
	for n := range cap(w.slots) {
		if err := w.place(ctx); err != nil {
			w.release(n)
			return 0, err
		}
	}
	return cap(w.slots), nil
}

func (w *window) release(places int) {
	for range places {
		<-w.slots
	}
}

func (w *window) place(ctx context.Context) error {
	if reason, isBlocked := w.conn.Blocked(); isBlocked {
		return blocked(reason)
	}
	select {
	case w.slots <- struct{}{}:
		return nil
	default:
	}
	look := time.NewTicker(blockedInterval) // a block may begin while this waits
	defer look.Stop()
	for {
		select {
		case w.slots <- struct{}{}:
			return nil
		case <-w.dead:
			return unavailable(w.why())
		case <-ctx.Done():
			return unavailable(ctx.Err())
		case <-look.C:
			if reason, isBlocked := w.conn.Blocked(); isBlocked {
				return blocked(reason)
			}
		}
	}
}

// confirmed settles the head. A return arrives before its confirm, and is in
// the buffer by then.
func (w *window) confirmed() {
	ack := w.acked()
	w.collectReturns()
	e, done := w.pop()
	if e != nil {
		w.suspects.clear(e.out)
	}
	switch {
	case done == nil: // it was given up before
	case e.returned != "":
		done(fmt.Errorf("%w: %s", ErrUnroutable, e.returned))
	case !ack:
		done(ErrNacked)
	default:
		done(nil)
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
	case <-w.dead: // the write failed
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

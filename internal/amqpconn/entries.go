package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// entry is a message in the window.
type entry struct {
	ctx      context.Context // of the one Publish call
	out      Out
	done     func(error) // nil once it was called
	places   int         // in the window: all of them if it is alone
	since    time.Time
	writing  bool
	written  bool
	returned string // why the broker returned it
}

// take returns done for its only call.
func (e *entry) take() func(error) {
	done := e.done
	e.done = nil
	return done
}

// enqueue adds a message for which a place is reserved.
func (w *window) enqueue(e *entry) {
	w.mu.Lock()
	err := w.ended
	if err == nil {
		w.queue = append(w.queue, e)
		w.out <- e
	}
	w.mu.Unlock()
	if err != nil {
		e.done(failure(e.out, err))
	}
}

// begin reports whether an entry is still to be written. One that was given up
// while it waited for the writer leaves the window: it will have no confirm.
func (w *window) begin(e *entry) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended != nil {
		return false
	}
	if e.done == nil {
		i := slices.Index(w.queue, e)
		w.queue = slices.Delete(w.queue, i, i+1)
		w.release(e.places)
		return false
	}
	e.writing = true
	w.writing = time.Now()
	return true
}

// wrote ends what begin began.
func (w *window) wrote(e *entry) {
	w.mu.Lock()
	e.writing, e.written = false, true
	w.writing = time.Time{}
	var done func(error)
	if w.ended != nil {
		done = e.take()
	}
	err := w.ended
	w.mu.Unlock()
	if done != nil {
		done(w.failure(e, err))
	}
}

// pop removes the head of the window and frees its place. Done is nil when it
// was called before, or when there is no head any more.
func (w *window) pop() (e *entry, done func(error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		return nil, nil
	}
	e = w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	w.release(e.places)
	return e, e.take()
}

// markReturned finds the message a return speaks of: the first one like it that
// was not returned yet, for returns keep the order of publishing.
func (w *window) markReturned(r amqp.Return) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.queue {
		if e.returned == "" && e.out.Message.MessageId == r.MessageId && e.out.Exchange == r.Exchange && e.out.Key == r.RoutingKey {
			e.returned = fmt.Sprintf("%s (%d)", r.ReplyText, r.ReplyCode)
			return
		}
	}
}

// expire gives up messages whose caller has left, and those that wait too long
// for their confirm. While the broker has blocked the connection these stay in
// the window as empty places, since it will confirm them in the end. Otherwise a
// late confirm means that the session is beyond hope, whether or not its caller has left:
// a place that is never freed is lost to all.
func (w *window) expire(now time.Time) error {
	limit := now.Add(-w.cfg.ConfirmTimeout)
	reason, isBlocked := w.conn.Blocked()
	type loss struct {
		done func(error)
		err  error
	}
	var losses []loss

	w.mu.Lock()
	if isBlocked {
		w.blocked = now
	}
	stuck := !w.writing.IsZero() && w.writing.Before(limit)
	late := false
	for _, e := range w.queue {
		switch {
		case e.writing:
		case e.done == nil:
			late = late || e.written && e.since.Before(limit) && w.blocked.Before(limit)
		case e.ctx.Err() != nil:
			losses = append(losses, loss{e.take(), unavailable(e.ctx.Err())})
		case e.since.After(limit):
		case isBlocked:
			losses = append(losses, loss{e.take(), blocked(reason)})
		default:
			late = true
		}
	}
	w.mu.Unlock()

	for _, l := range losses {
		l.done(l.err)
	}
	switch {
	case stuck:
		return errors.New("a write got stuck")
	case late:
		return fmt.Errorf("no confirm within %v", w.cfg.ConfirmTimeout)
	}
	return nil
}

func (w *window) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue) == 0
}

func (w *window) why() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ended
}

// end fails everything still in the window; only the first call counts. A
// message that is being written is left to wrote, since its body is in use.
func (w *window) end(err error) {
	if err == nil {
		err = errNotRunning
	}
	w.mu.Lock()
	if w.ended != nil {
		w.mu.Unlock()
		return
	}
	w.ended = err
	close(w.dead)
	if refusal(err) {
		w.suspects.add(w.doubtful(err))
	}
	w.mu.Unlock()
	w.fail(func(e *entry) bool { return !e.writing })
}

// abandon fails what end has left to a writer that does not come back.
func (w *window) abandon() { w.fail(func(*entry) bool { return true }) }

func (w *window) fail(which func(*entry) bool) {
	type loss struct {
		e    *entry
		done func(error)
	}
	var losses []loss
	w.mu.Lock()
	err := w.ended
	for _, e := range w.queue {
		if e.done != nil && which(e) {
			losses = append(losses, loss{e, e.take()})
		}
	}
	w.mu.Unlock()
	for _, l := range losses {
		l.done(w.failure(l.e, err))
	}
}

// doubtful returns the messages the broker may have meant: none if it has named one; w.mu is held.
func (w *window) doubtful(err error) []*entry {
	var sent []*entry
	for _, e := range w.queue {
		if !e.writing && !e.written {
			continue
		}
		if !errors.Is(failure(e.out, err), ErrUnavailable) {
			return nil
		}
		sent = append(sent, e)
	}
	return sent
}

// alone reports whether nothing else can be on its way beside e.
func (w *window) alone(e *entry) bool { return e.places == cap(w.slots) }

// failure is that of a message when the session has ended: one that was alone is to blame.
func (w *window) failure(e *entry, err error) error {
	f := failure(e.out, err)
	if errors.Is(f, ErrUnavailable) && w.alone(e) && refusal(err) {
		return fmt.Errorf("%w: %w", ErrNacked, err)
	}
	return f
}

// failure is the error of a message whose session has ended. The broker closes
// the channel over one exchange, or over one message that is larger than its own
// limit: only messages to that exchange, or of that size, are to blame.
func failure(out Out, err error) error {
	reply, ok := errors.AsType[*amqp.Error](err)
	if !ok {
		return unavailable(err)
	}
	blames := func(what string) bool { return strings.Contains(reply.Reason, what) }
	switch {
	case (reply.Code == amqp.NotFound || reply.Code == amqp.AccessRefused) && blames("exchange '"+out.Exchange+"'"):
		return fmt.Errorf("%w: %w", ErrUnroutable, err)
	case reply.Code == amqp.PreconditionFailed && blames(fmt.Sprintf("message size %d is larger", len(out.Message.Body))):
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return unavailable(err)
}

package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// entry is a message in the window.
type entry struct {
	ctx      context.Context // of the one Publish call
	out      Out
	done     func(error) // nil once it was called, or is another's to call
	suspect  bool        // it is published alone
	places   int         // in the window: all of them if it is alone
	since    time.Time
	writing  bool
	written  bool
	returned string // why the broker returned it
}

// sent reports whether the broker may have seen the message.
func (e *entry) sent() bool { return e.writing || e.written }

// take returns done for its only call.
func (e *entry) take() func(error) {
	done := e.done
	e.done = nil
	return done
}

// enqueue adds a message for which a place is reserved. It is false when the window has ended.
func (w *window) enqueue(e *entry) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return false
	}
	w.queue = append(w.queue, e)
	w.out <- e
	return true
}

// begin reports whether an entry is still to be written. One that was given up
// while it waited for the writer leaves the window: it will have no confirm.
func (w *window) begin(e *entry) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
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
func (w *window) wrote(e *entry, whole bool) {
	w.mu.Lock()
	e.writing, e.written = false, whole
	w.writing = time.Time{}
	ended := w.ended
	w.mu.Unlock()
	if ended {
		w.settle(func(other *entry) bool { return other == e })
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

// pending returns how many bytes of bodies are not confirmed.
func (w *window) pending() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	size := 0
	for _, e := range w.queue {
		size += len(e.out.Message.Body)
	}
	return size
}

// end decides about everything still in the window; only the first call counts. A
// message that is being written is left to wrote, since its body is in use.
func (w *window) end(err error) {
	if err == nil {
		err = errNotRunning
	}
	w.mu.Lock()
	if w.ended {
		w.mu.Unlock()
		return
	}
	w.ended = true
	w.condemn(err)
	close(w.dead)
	w.mu.Unlock()
	w.settle(func(e *entry) bool { return !e.writing })
}

// condemn finds whom to blame for the end of the window, and has it remembered; w.mu is held.
func (w *window) condemn(err error) {
	sent := slices.DeleteFunc(slices.Clone(w.queue), func(e *entry) bool { return !e.sent() })
	w.verdict = judge(err, sent)
	if w.verdict.reply == nil {
		return
	}
	if w.verdict.words == "" {
		w.suspects.add(sent)
	}
	for _, e := range sent {
		if failure := w.verdict.of(e, w.alone(e)); failure != nil {
			w.facts.learn(w.verdict, e.out, failure)
		}
	}
}

// abandon settles what end has left to a writer that does not come back.
func (w *window) abandon() { w.settle(func(*entry) bool { return true }) }

// settle has the messages that are to blame fail, and keeps the others for another window.
func (w *window) settle(which func(*entry) bool) {
	type loss struct {
		done func(error)
		err  error
	}
	var losses []loss
	w.mu.Lock()
	for _, e := range w.queue {
		if e.done == nil || !which(e) {
			continue
		}
		if err := w.verdict.of(e, w.alone(e)); err != nil {
			losses = append(losses, loss{e.take(), err})
			continue
		}
		suspect := e.suspect || w.verdict.words == "" && e.sent()
		w.rest = append(w.rest, &entry{ctx: e.ctx, out: e.out, done: e.take(), suspect: suspect})
	}
	w.mu.Unlock()
	for _, l := range losses {
		l.done(l.err)
	}
}

// clear frees the places of a window that has ended, and returns the messages to publish again.
func (w *window) clear() []*entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.queue {
		w.release(e.places)
	}
	w.queue = nil
	return w.rest
}

// alone reports whether nothing else can be on its way beside e.
func (w *window) alone(e *entry) bool { return e.places == cap(w.slots) }

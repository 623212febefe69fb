package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// stage is how far a message in the window has come.
type stage int

const (
	queued  stage = iota // not written, or not as a whole
	writing              // the writer has it, so its body is in use
	written              // the broker is to confirm it
)

// entry is a message in the window. Its caller gets one answer: at its confirm, when it is given up
// before, or when the window ends. One that is answered early stays in the window as an empty
// place, since its confirm may still come.
type entry struct {
	ctx      context.Context // of the one Publish call
	out      Out
	answer   func(error) // to the caller; nil once it was taken
	suspect  bool        // it is published alone
	places   int         // in the window: all of them if it is alone
	since    time.Time
	stage    stage
	returned string // why the broker returned it
}

// sent reports whether the broker may have seen the message.
func (e *entry) sent() bool { return e.stage != queued }

// answered reports whether the answer was given, or taken over by another entry.
func (e *entry) answered() bool { return e.answer == nil }

// takeAnswer returns the answer for its only call.
func (e *entry) takeAnswer() func(error) {
	answer := e.answer
	e.answer = nil
	return answer
}

// failure is an answer that is decided on under the lock of a window, and given after it.
type failure struct {
	answer func(error)
	err    error
}

func give(failures []failure) {
	for _, f := range failures {
		f.answer(f.err)
	}
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

// beginWrite reports whether an entry is still to be written. One that was given up
// while it waited for the writer leaves the window: it will have no confirm.
func (w *window) beginWrite(e *entry) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return false
	}
	if e.answered() {
		i := slices.Index(w.queue, e)
		w.queue = slices.Delete(w.queue, i, i+1)
		w.release(e.places)
		return false
	}
	e.stage = writing
	w.writing = time.Now()
	return true
}

// endWrite ends what beginWrite began. A window that has ended meanwhile left the entry to it.
func (w *window) endWrite(e *entry, whole bool) {
	w.mu.Lock()
	e.stage = queued
	if whole {
		e.stage = written
	}
	w.writing = time.Time{}
	ended := w.ended
	w.mu.Unlock()
	if ended {
		w.settle(func(other *entry) bool { return other == e })
	}
}

// takeHead removes the head of the window and frees its place. The answer is nil when it
// was given before, or when there is no head any more.
func (w *window) takeHead() (e *entry, answer func(error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		return nil, nil
	}
	e = w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	w.release(e.places)
	return e, e.takeAnswer()
}

// markReturned finds the message a return speaks of: the first one like it that
// was not returned yet, for returns keep the order of publishing.
func (w *window) markReturned(r amqp.Return) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.queue {
		if e.returned == "" && e.out.Message.MessageId == r.MessageId && e.out.Exchange == r.Exchange && e.out.Key == r.RoutingKey {
			e.returned = fmt.Sprintf("%s (%d) from exchange %q with routing key %q", r.ReplyText, r.ReplyCode, r.Exchange, r.RoutingKey)
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
	var failures []failure

	w.mu.Lock()
	if isBlocked {
		w.blocked = now
	}
	stuck := !w.writing.IsZero() && w.writing.Before(limit)
	late := false
	for _, e := range w.queue {
		switch {
		case e.stage == writing:
		case e.answered():
			late = late || e.stage == written && e.since.Before(limit) && w.blocked.Before(limit)
		case e.ctx.Err() != nil:
			failures = append(failures, failure{e.takeAnswer(), unavailable(e.ctx.Err())})
		case e.since.After(limit):
		case isBlocked:
			failures = append(failures, failure{e.takeAnswer(), blocked(reason)})
		default:
			late = true
		}
	}
	w.mu.Unlock()

	give(failures)
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
// message that is being written is left to endWrite, since its body is in use.
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
	w.blame(err)
	close(w.dead)
	w.mu.Unlock()
	w.settle(func(e *entry) bool { return e.stage != writing })
}

// blame finds the messages over which the window has ended, and has them remembered; w.mu is held.
func (w *window) blame(err error) {
	sent := slices.DeleteFunc(slices.Clone(w.queue), func(e *entry) bool { return !e.sent() })
	w.verdict = judge(err, sent)
	if w.verdict.reply == nil {
		return
	}
	if w.verdict.words == "" {
		w.suspects.add(sent)
	}
	for _, e := range sent {
		if err := w.verdict.of(e, w.alone(e)); err != nil {
			w.facts.learn(w.verdict, e.out, err)
		}
	}
}

// settleAll settles what end has left to a writer that does not come back.
func (w *window) settleAll() { w.settle(func(*entry) bool { return true }) }

// settle has the messages that are to blame fail, and keeps the others for another window.
func (w *window) settle(which func(*entry) bool) {
	var failures []failure
	w.mu.Lock()
	for _, e := range w.queue {
		if e.answered() || !which(e) {
			continue
		}
		if err := w.verdict.of(e, w.alone(e)); err != nil {
			failures = append(failures, failure{e.takeAnswer(), err})
			continue
		}
		suspect := e.suspect || w.verdict.words == "" && e.sent()
		w.rest = append(w.rest, &entry{ctx: e.ctx, out: e.out, answer: e.takeAnswer(), suspect: suspect})
	}
	w.mu.Unlock()
	give(failures)
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

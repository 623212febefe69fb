package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// window is one publishing channel of a session. The client orders confirms like the publishes and splits the
// broker's "multiple". So the window is a queue: every confirm belongs to its head. The client forgets an early
// nack when a later ack is a "multiple", so the result of a message is read from its own confirm.
type window struct {
	cfg      PublisherConfig
	conn     *Conn
	ch       *amqp.Channel
	facts    *facts
	suspects *suspects

	confirms <-chan amqp.Confirmation
	answers  chan *amqp.DeferredConfirmation // of the published messages, in order
	returns  <-chan amqp.Return
	closes   <-chan *amqp.Error

	slots    chan struct{} // shared by the windows of a session
	out      chan *entry   // to the writer; never full, because an entry in it holds a slot
	broken   chan struct{} // closed when the writer has failed
	dead     chan struct{} // closed when the window has ended
	replaced chan struct{} // closed when another window has replaced it
	opened   time.Time
	nacked   bool // a queue has refused a message; only for the listening goroutine

	mu      sync.Mutex
	queue   []*entry
	ended   bool
	verdict verdict   // set when it has ended
	rest    []*entry  // to publish again elsewhere
	writing time.Time // start of the current write; zero: none
	blocked time.Time // when the broker was last seen blocking
}

var errEnded = errors.New("the window has ended")

// openWindow opens a channel in confirm mode. The listeners have room for a whole window, so the client never
// waits for us while it reads from the connection.
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

// run serves the window until it fails, or until ctx is cancelled and the window is empty. If the broker has
// refused a message, the connection stays open; otherwise it is closed. Stop is called when ctx is cancelled.
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
		// The client may be stuck in a write on a connection that it has given up itself.
		w.settleAll()
	}
	return err
}

// replaceable reports whether the window has ended because the broker refused a message, on a connection that
// still works.
func (w *window) replaceable() bool { return w.verdict.overMessage() && !w.conn.raw.IsClosed() }

// write is the only goroutine that publishes on the channel. It ends with the window, or when it can no longer
// write.
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
				w.answers <- answer // it has room for all unconfirmed messages
			}
			w.endWrite(e, err == nil)
			if err != nil {
				close(w.broken)
				return
			}
		}
	}
}

// listen handles the replies of the broker.
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

// nackedFor is the lifetime of a window after a queue has refused a message in it.
const nackedFor = 15 * time.Second

// outdated reports whether another window may succeed. RabbitMQ reports to the publishers of a quorum queue that
// it is full, but not that its limit was removed later, and continues to refuse their messages while it accepts
// those of others. Nothing is in flight that would be lost.
func (w *window) outdated(now time.Time) bool {
	return w.nacked && len(w.slots) == 0 && now.Sub(w.opened) > nackedFor
}

// drainConfirms handles confirms that arrived before the session ended.
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

// cause returns why the channel has ended. The client may close it before it reports the reason.
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

// confirmed settles the head. A return arrives before its confirm, and is in the buffer by then.
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

// acked reports whether the broker acked the head. The confirm may arrive before the writer has sent its answer.
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

// stage is the progress of a message in the window.
type stage int

const (
	queued  stage = iota // not written, or only partly
	writing              // the writer uses its body
	written              // awaiting the broker's confirm
)

// entry is a message in the window. Its caller gets one answer: at its confirm, when it is given up before, or
// when the window ends. A message that is answered early stays in the window as an empty place, because its
// confirm may still arrive.
type entry struct {
	ctx      context.Context // of its Publish call
	out      Out
	answer   func(error) // to the caller; nil after it was taken
	suspect  bool        // it is published alone
	places   int         // in the window: all of them if it is alone
	since    time.Time
	stage    stage
	returned string // why the broker returned it
}

// sent reports whether the broker may have seen the message.
func (e *entry) sent() bool { return e.stage != queued }

// answered reports whether the answer was given, or moved to another entry.
func (e *entry) answered() bool { return e.answer == nil }

// takeAnswer returns the answer function for its only call.
func (e *entry) takeAnswer() func(error) {
	answer := e.answer
	e.answer = nil
	return answer
}

// failure is an answer that is decided under the lock of a window, and given after unlocking.
type failure struct {
	answer func(error)
	err    error
}

func give(failures []failure) {
	for _, f := range failures {
		f.answer(f.err)
	}
}

// enqueue adds a message with a reserved place. It returns false if the window has ended.
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

// beginWrite reports whether an entry must still be written. An entry that was given up while it waited for the
// writer leaves the window, because it will have no confirm.
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

// endWrite ends the write. If the window has ended meanwhile, endWrite settles the entry.
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

// takeHead removes the head of the window and frees its place. The answer is nil if it was given before, or if
// there is no head.
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

// markReturned finds the message of a return: the first matching one that was not returned yet, because returns
// keep the order of publishing.
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

// expire gives up messages whose caller has left, and messages that wait too long for their confirm. While the
// broker blocks the connection, late messages stay in the window as empty places, because it will confirm them in
// the end. Otherwise a late confirm ends the session, even if its caller has left: a place that is never freed
// would be lost for all.
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

// pending returns the number of unconfirmed body bytes.
func (w *window) pending() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	size := 0
	for _, e := range w.queue {
		size += len(e.out.Message.Body)
	}
	return size
}

// end settles everything still in the window; only the first call counts. A message that is being written is left
// to endWrite, because its body is in use.
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

// blame finds the messages that ended the window, and records them as suspects; w.mu is held.
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

// settleAll settles the entries that end left to a stuck writer.
func (w *window) settleAll() { w.settle(func(*entry) bool { return true }) }

// settle fails the messages that ended the window, and keeps the others for another window.
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

// alone reports whether nothing else can be in flight beside e.
func (w *window) alone(e *entry) bool { return e.places == cap(w.slots) }

// blockedInterval is how often calls that wait for a place check whether the broker has blocked the connection. A
// blocked connection frees no places until its alarm ends.
const blockedInterval = 250 * time.Millisecond

// admit puts a message into the window when there is room. The error is errEnded if the window has ended.
func (w *window) admit(e *entry) error {
	if err := w.reserve(e); err != nil {
		return err
	}
	e.since = time.Now()
	if !w.enqueue(e) {
		w.release(e.places)
		return errEnded
	}
	return nil
}

// reserve waits for a free place, or for all places if the message is a suspect. It stops waiting if the broker
// has blocked the connection.
func (w *window) reserve(e *entry) error {
	if !e.suspect && !w.suspects.has(e.out) {
		e.places = 1
		return w.place(e.ctx)
	}
	select {
	case w.suspects.turn <- struct{}{}:
		defer func() { <-w.suspects.turn }()
	case <-w.dead:
		return errEnded
	case <-e.ctx.Done():
		return unavailable(e.ctx.Err())
	}
	for e.places = 0; e.places < cap(w.slots); e.places++ {
		if err := w.place(e.ctx); err != nil {
			w.release(e.places)
			return err
		}
	}
	return nil
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
	look := time.NewTicker(blockedInterval) // a block may start during this wait
	defer look.Stop()
	for {
		select {
		case w.slots <- struct{}{}:
			return nil
		case <-w.dead:
			return errEnded
		case <-ctx.Done():
			return unavailable(ctx.Err())
		case <-look.C:
			if reason, isBlocked := w.conn.Blocked(); isBlocked {
				return blocked(reason)
			}
		}
	}
}

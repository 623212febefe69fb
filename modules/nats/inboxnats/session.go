package inboxnats

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
)

const (
	// pullTime is how long the server keeps a request for messages. A process that has lost its lease must not have a
	// request.
	pullTime = 2 * time.Second
	// pullPause is the pause after a request that the server rejects.
	pullPause = 250 * time.Millisecond
)

var (
	errClosed = errors.New("inboxnats: the session is closed")
	errGap    = errors.New("inboxnats: messages before this one went elsewhere or were lost on their way")
)

// session implements driver.Session. Its requests at the server are for as many messages as the window has room for.
type session struct {
	*source
	hand   *hand
	feeds  [2]*feed // the stream, and the retries
	lease  *lease   // nil: the stream is not Ordered
	wait   time.Duration
	asking sync.Mutex // held while requests are made or withdrawn
}

// Start implements driver.Session.
func (s *session) Start(_ context.Context, window int) error {
	if window < 1 || window > maxWindow {
		return fmt.Errorf("inboxnats: a window of %d, from 1 to %d are allowed", window, maxWindow)
	}
	return s.hand.start(window)
}

// Receive implements driver.Session.
func (s *session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	for {
		if s.lease != nil && s.lease.ended() {
			return nil, s.failed("receive", errLease)
		}
		if ds, err := s.hand.next(most); len(ds) > 0 || err != nil {
			return ds, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := s.request(ctx); err != nil {
			if ctx.Err() != nil { // it has interrupted the call
				return nil, ctx.Err()
			}
			return nil, s.failed("receive", err)
		}
		select {
		case <-ctx.Done():
		case <-s.hand.changed:
		case <-time.After(pullPause):
		}
	}
}

// request asks for messages once the session has the lease.
func (s *session) request(ctx context.Context) error {
	if !s.asking.TryLock() {
		return nil // GiveBack wakes Receive
	}
	defer s.asking.Unlock()
	if s.lease != nil && !s.lease.lasts() {
		if taken, err := s.lease.take(ctx); err != nil || !taken {
			return err
		}
	}
	if s.lease != nil {
		if err := s.takeOver(ctx); err != nil {
			return err
		}
	}
	for _, f := range s.feeds {
		if err := f.ask(ctx); err != nil {
			return err
		}
	}
	return nil
}

// takeOver makes the new owner first receive the messages of the previous owner, in order. It counts them again from time
// to time, because acknowledged and deleted ones never arrive.
func (s *session) takeOver(ctx context.Context) error {
	f, h := s.feeds[0], s.hand
	h.mu.Lock()
	first, ours := f.next == 0, 0
	if !first && (h.hold == 0 || time.Now().Before(h.recount)) {
		h.mu.Unlock()
		return nil
	}
	for p := range h.all {
		if !p.retries {
			ours++
		}
	}
	h.mu.Unlock()
	info, err := s.info(ctx, s.stream)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if first {
		f.next = info.Delivered.Consumer + 1
		h.hold, h.horizon = info.NumAckPending, info.Delivered.Stream
		// A sign of life of the previous owner may arrive late, and delays the redelivery once more.
		h.until = time.Now().Add(2*info.Config.AckWait + pullTime)
	}
	h.hold = min(h.hold, max(info.NumAckPending-ours, 0))
	if time.Now().After(h.until) {
		h.hold = 0
	}
	h.recount = time.Now().Add(pullTime)
	h.sorted()
	return nil
}

// Stop implements driver.Session.
func (s *session) Stop(ctx context.Context) error {
	s.hand.stop()
	s.asking.Lock()
	defer s.asking.Unlock()
	if err := s.withdraw(ctx); err != nil {
		return s.failed("stop", err)
	}
	return s.giveBack(ctx, s.hand.unseen())
}

// withdraw ends the requests at the server. Messages on their way still arrive. The caller holds the lock asking.
//
// Before version 2.10.16 nats-server delivers a message twice and delays another one if a message is to be redelivered
// while an abandoned request is there. It removes abandoned requests when it is asked for the consumer.
func (s *session) withdraw(ctx context.Context) (failed error) {
	for _, f := range s.feeds {
		timeout := s.Timeout
		if failed != nil {
			timeout = 0
		}
		asked, err := f.drain(timeout)
		if err == nil && asked {
			_, err = s.info(ctx, f.stream)
		}
		failed = cmp.Or(failed, err)
	}
	return failed
}

// Close implements driver.Session.
func (s *session) Close(ctx context.Context) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // its end must not delay the requeue
	defer cancel()
	s.hand.lose(errClosed)
	err := s.Stop(ctx)
	if err != nil {
		cancel() // the rest is sent and not waited for
	}
	if err = cmp.Or(err, s.giveBack(ctx, s.hand.drop())); err != nil {
		cancel()
	}
	if s.lease != nil {
		err = cmp.Or(err, s.lease.leave(ctx))
	}
	s.closed(s)
	return err
}

// Ack implements driver.Session. Acknowledgements may be lost with the connection. They are sent again, because the server
// ignores a second one.
func (s *session) Ack(ctx context.Context, ds []driver.Delivery, _ bool) error {
	held := s.hand.take(ds)
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	err := s.settle(ctx, held, "+ACK")
	for errors.Is(err, nats.ErrConnectionClosed) && !s.conn.IsClosed() {
		err = s.settle(ctx, held, "+ACK")
	}
	if err != nil {
		return s.failed("acknowledge", err)
	}
	return stale(len(ds) - len(held))
}

// GiveBack implements driver.Session.
func (s *session) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	held := s.hand.take(ds) // before the server redelivers them, perhaps to this session
	s.asking.Lock()
	defer s.hand.wake() // after the unlock, because Receive may find the lock held
	defer s.asking.Unlock()
	err := s.withdraw(ctx)
	if err == nil {
		err = s.giveBack(ctx, held)
	}
	if err != nil {
		return s.failed("requeue messages", err)
	}
	return stale(len(ds) - len(held))
}

func (s *session) giveBack(ctx context.Context, ds []*delivery) error {
	slices.SortFunc(ds, func(a, b *delivery) int { return cmp.Compare(a.seq, b.seq) })
	return s.settle(ctx, ds, "-NAK")
}

// settle sends one kind of acknowledgement for all deliveries, and waits until the server has read them. The error is
// nats.ErrConnectionClosed if the connection was lost, even if there is a new one.
func (s *session) settle(ctx context.Context, ds []*delivery, what string) error {
	if len(ds) == 0 {
		return nil
	}
	before := s.conn.Stats().Reconnects
	var failed error
	for _, d := range ds {
		if failed = s.conn.Publish(d.msg.Reply, []byte(what)); failed != nil {
			break // the client may not know yet that the connection is lost: the flush finds out
		}
	}
	s.hand.wake() // the next request does not wait for the answer
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	err := s.conn.FlushWithContext(ctx)
	if err == nil && s.conn.Stats().Reconnects != before { // a flush does not report what was lost before it
		return nats.ErrConnectionClosed
	}
	return cmp.Or(err, failed)
}

// renew reports the messages in flight to the server, and extends the lease.
func (s *session) renew(ctx context.Context) {
	if s.lease != nil {
		if err := s.lease.renew(ctx); err != nil {
			s.hand.lose(err)
			return
		}
	}
	if err := s.settle(ctx, s.hand.held(), "+WPI"); err != nil {
		s.warn(ctx, "inbox: could not extend messages", err)
	}
}

// failed ends the session, because its unsettled messages would otherwise be renewed.
func (s *session) failed(what string, err error) error {
	err = fault(what, err)
	s.hand.lose(err)
	return err
}

// stale returns the error of n deliveries that the session no longer has.
func stale(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("inboxnats: %d deliveries: %w", n, driver.ErrStale)
}

// feed receives the messages of a durable consumer. The mutex of hand guards its state below, and asking the rest.
type feed struct {
	session *session
	stream  string
	retries bool

	sub   *nats.Subscription // nil: there is no request
	inbox string             // the replies to a request for 5 messages go to <inbox>.5

	asked int       // messages of its requests that have not arrived
	until time.Time // end of the last request; after it, its answer is lost
	after time.Time // earliest time of the next request
	next  uint64    // the required number of the next delivery if order counts; 0: any
}

// drain ends the subscription, after which nothing more of its requests arrives. It reports whether the server still
// has a request.
func (f *feed) drain(timeout time.Duration) (asked bool, err error) {
	f.session.hand.mu.Lock()
	asked, f.asked = f.asked > 0, 0
	f.session.hand.mu.Unlock()
	sub := f.sub
	if f.sub = nil; sub == nil {
		return false, nil
	}
	over := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(over) })
	err = sub.Drain()
	if err == nil {
		select {
		case <-over:
			return asked, nil
		case <-time.After(timeout):
			err = nats.ErrTimeout
		}
	}
	_ = sub.Unsubscribe() // messages on their way are redelivered
	return false, err
}

// ask requests as many messages as the window has room for.
func (f *feed) ask(ctx context.Context) error {
	n, silent := f.due()
	if silent { // the server did not end the requests in time: check whether it answers
		_, err := f.session.info(ctx, f.stream)
		return err
	}
	if n == 0 {
		return nil
	}
	if f.sub == nil {
		var err error
		f.inbox = f.session.conn.NewInbox()
		if f.sub, err = f.session.conn.Subscribe(f.inbox+".*", f.arrived); err != nil {
			return err
		}
		if err := f.sub.SetPendingLimits(-1, -1); err != nil { // requests limit it
			return err
		}
	}
	request, err := json.Marshal(map[string]any{"batch": n, "expires": pullTime})
	if err != nil {
		return err
	}
	return f.session.conn.PublishRequest(jetstream.DefaultAPIPrefix+"CONSUMER.MSG.NEXT."+f.stream+"."+f.session.consumer, f.inbox+"."+strconv.Itoa(n), request)
}

// due returns the number of messages to request, and whether answers to requests were lost.
func (f *feed) due() (n int, silent bool) {
	h := f.session.hand
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if f.asked > 0 && now.After(f.until) {
		f.asked = 0
		return 0, true
	}
	if now.Before(f.after) {
		return 0, false
	}
	if f.retries && h.hold > 0 {
		return 0, false
	}
	if n = h.room(f.asked); n > 0 {
		f.asked, f.until = f.asked+n, now.Add(pullTime+time.Second)
	}
	return n, false
}

// arrived handles one message of the server: a delivery, or the end of a request.
func (f *feed) arrived(msg *nats.Msg) {
	meta, err := msg.Metadata()
	if err != nil {
		f.ended(msg)
		return
	}
	s := f.session
	d := &delivery{place: place{f.retries, meta.Sequence.Stream}, session: s, msg: msg, meta: meta}
	wait := time.Duration(0)
	if f.retries {
		wait = due(d.headers()[wire.HeaderWait], time.Since(meta.Timestamp), meta.NumDelivered > 1)
	}
	s.hand.mu.Lock()
	defer s.hand.mu.Unlock()
	defer s.hand.wake()
	f.asked = max(f.asked-1, 0)
	switch {
	case wait > 0: // it is not due
		_ = msg.NakWithDelay(wait) // if it fails, the server redelivers it
	case f.next > 0 && meta.Sequence.Consumer != f.next:
		s.hand.lost = cmp.Or(s.hand.lost, errGap)
	default:
		if f.next > 0 {
			f.next++
		}
		if newer := s.hand.add(d); newer {
			f.after = time.Now().Add(pullPause)
		}
	}
}

// ended handles the end of a request.
func (f *feed) ended(msg *nats.Msg) {
	status, why := msg.Header.Get("Status"), msg.Header.Get("Description")
	if status == "" {
		return
	}
	left, err := strconv.Atoi(msg.Header.Get("Nats-Pending-Messages"))
	if err != nil { // the server has rejected the request
		left, _ = strconv.Atoi(msg.Subject[strings.LastIndex(msg.Subject, ".")+1:])
	}
	h := f.session.hand
	h.mu.Lock()
	defer h.mu.Unlock()
	f.asked = max(f.asked-left, 0)
	switch {
	case why == "Consumer Deleted", strings.HasPrefix(why, "Exceeded MaxRequest"), status == "400", status == "503": // for good
		h.lost = cmp.Or(h.lost, fmt.Errorf("inboxnats: consumer %s of stream %s rejects requests: %s %s", f.session.consumer, f.stream, status, why))
	case status != "404" && status != "408":
		f.after = time.Now().Add(pullPause)
	}
	h.wake()
}

// place is the location of a message: in the stream or among the retries, and its number there.
type place struct {
	retries bool
	seq     uint64
}

// delivery is one delivery of a message.
type delivery struct {
	place

	session *session
	msg     *nats.Msg
	meta    *nats.MsgMetadata
	start   int // of the session; 0: not handed out yet
	once    sync.Once
	all     map[string]string
	read    sync.Once
	message *inbox.Message
}

// headers returns the decoded headers of the message.
func (d *delivery) headers() map[string]string {
	d.once.Do(func() { d.all = form.Decode(d.msg.Header) })
	return d.all
}

// Message implements driver.Delivery. The first delivery of a delayed retry is not counted, because it started the
// delay.
func (d *delivery) Message() *inbox.Message {
	d.read.Do(func() {
		d.message = message(d.headers(), d.msg.Data, d.session.queue, d.session.symfony)
		first := uint64(1)
		if d.headers()[wire.HeaderWait] != "" {
			first = 2
		}
		d.message.Redelivered = d.meta.NumDelivered > first
	})
	return d.message
}

// Slow implements driver.SlowDelivery.
func (d *delivery) Slow() bool {
	return d.session.symfony.Slow(d.msg.Data, d.headers()[form.ContentType])
}

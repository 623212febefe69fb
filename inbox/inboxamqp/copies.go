package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// duplicate returns the envelope and body of a delivery for publishing again. It omits the broker's own headers
// except the slot, because readers would mistake them for the client's; the expiration, which would delete the
// copy; and the user id, which the broker accepts only from that user.
func duplicate(d amqp.Delivery) amqp.Publishing {
	headers := make(amqp.Table, len(d.Headers)+8)
	for name, value := range d.Headers {
		if !wire.OfBroker(name) && (!wire.Own(name) || credible(name, value)) {
			headers[name] = value
		}
	}
	delete(headers, wire.HeaderDelay)
	delete(headers, wire.HeaderDue)
	if slot := slotOf(d.Headers); slot != "" {
		headers[wire.HeaderRoutes] = []any{slot}
	}
	if _, copied := headers[wire.HeaderOriginKey]; !copied {
		headers[wire.HeaderOriginExchange], headers[wire.HeaderOriginKey] = d.Exchange, d.RoutingKey
	}
	return amqp.Publishing{
		Headers:         headers,
		ContentType:     d.ContentType,
		ContentEncoding: d.ContentEncoding,
		DeliveryMode:    amqp.Persistent,
		Priority:        d.Priority,
		CorrelationId:   d.CorrelationId,
		ReplyTo:         d.ReplyTo,
		MessageId:       d.MessageId,
		Timestamp:       d.Timestamp,
		Type:            d.Type,
		AppId:           d.AppId,
		Body:            d.Body,
	}
}

// credible reports whether a header of ours is short enough to be written by us. A sender could use the name for a
// value that fills the copy.
func credible(name string, value any) bool {
	most := driver.MaxErrorBytes // only the history may be longer than the error
	if name == wire.HeaderHistory {
		most = driver.MaxHistoryBytes
	}
	text, ok := wire.HeaderString(value)
	return ok && len(text) <= most
}

// nextCopy returns a copy of a message with its progress.
func nextCopy(d amqp.Delivery, m *inbox.Message, next driver.Progress) amqp.Publishing {
	p := duplicate(d)
	if isDead(d) { // a replayed dead letter is no longer a dead letter
		revive(p.Headers, m.Replays)
	}
	delete(p.Headers, wire.HeaderPutOff)
	delete(p.Headers, wire.HeaderWait)
	set(p.Headers, wire.HeaderAttempt, strconv.Itoa(next.Attempt), next.Attempt > 1)
	set(p.Headers, wire.HeaderRecovered, strconv.Itoa(next.Recovered), next.Recovered > 0)
	set(p.Headers, wire.HeaderFirstFailed, timeText(next.FirstFailedAt), !next.FirstFailedAt.IsZero())
	history := driver.EncodeHistory(next.History)
	set(p.Headers, wire.HeaderHistory, history, history != "")
	return p
}

// set sets or deletes a header.
func set(headers amqp.Table, name, value string, there bool) {
	if there {
		headers[name] = value
	} else {
		delete(headers, name)
	}
}

// cuts remove headers that do not fit into a frame, the least important ones first.
var cuts = [...]func(headers amqp.Table){
	func(headers amqp.Table) {
		identity := [...]string{wire.HeaderType, stampHeader(headers), headerContentType}
		for name, value := range headers {
			_, readable := wire.HeaderString(value)
			if !wire.Own(name) && name != wire.HeaderRoutes && !(readable && wire.Identifies(name)) && (!readable || !slices.Contains(identity[:], name)) {
				delete(headers, name)
			}
		}
	},
	func(headers amqp.Table) { delete(headers, wire.HeaderHistory) },
	func(headers amqp.Table) { delete(headers, wire.HeaderError) },
	func(headers amqp.Table) { // the sender's headers are still too large, and a copy without them is better than no copy
		for name := range headers {
			if !wire.Own(name) && name != wire.HeaderRoutes {
				delete(headers, name)
			}
		}
	},
}

// revive removes the headers that a dead letter or failure added.
func revive(headers amqp.Table, replays int) {
	for name := range headers {
		if wire.Own(name) && !ofSender(name) {
			delete(headers, name)
		}
	}
	headers[wire.HeaderReplays] = strconv.Itoa(replays)
}

// ofSender reports whether a header of ours describes the message, not its failures.
func ofSender(name string) bool {
	return name == wire.HeaderKey || name == wire.HeaderOriginExchange || name == wire.HeaderOriginKey
}

// setWait records the rest of a delay that is longer than the longest delay queue.
func setWait(p amqp.Publishing, rest time.Duration) {
	if rest <= 0 {
		delete(p.Headers, wire.HeaderWait)
		return
	}
	p.Headers[wire.HeaderWait] = strconv.FormatInt(rest.Milliseconds(), 10)
}

// deadCopy returns a copy of a message with the reason for giving it up.
func deadCopy(d amqp.Delivery, dead inbox.DeadLetter) amqp.Publishing {
	p := duplicate(d)
	delete(p.Headers, wire.HeaderWait)
	delete(p.Headers, wire.HeaderPutOff)
	p.Headers[wire.HeaderAttempt] = strconv.Itoa(dead.Attempts)
	if dead.Message.Replays > 0 {
		p.Headers[wire.HeaderReplays] = strconv.Itoa(dead.Message.Replays)
	}
	p.Headers[wire.HeaderClass] = dead.Class
	p.Headers[wire.HeaderError] = dead.Error
	set(p.Headers, wire.HeaderErrorType, dead.ErrorType, dead.ErrorType != "")
	set(p.Headers, wire.HeaderSQLState, dead.SQLState, dead.SQLState != "")
	set(p.Headers, wire.HeaderFingerprint, dead.Fingerprint, dead.Fingerprint != "")
	history := driver.EncodeHistory(dead.Message.History)
	set(p.Headers, wire.HeaderHistory, history, history != "")
	p.Headers[wire.HeaderFirstFailed] = timeText(dead.FirstFailedAt)
	p.Headers[wire.HeaderLastFailed] = timeText(dead.FailedAt)
	p.Headers[wire.HeaderConsumer] = dead.Consumer
	p.Headers[wire.HeaderOrigin] = dead.Message.Queue
	return p
}

// replayCopy returns a dead letter as a message that was never tried.
func replayCopy(d amqp.Delivery) amqp.Publishing {
	p := duplicate(d)
	revive(p.Headers, max(intHeader(d, wire.HeaderReplays), 0)+1)
	return p
}

// readDead parses a dead letter that deadCopy made.
func readDead(d amqp.Delivery, class string, by *wire.Symfony) inbox.DeadLetter {
	m := convert(d, header(d, wire.HeaderOrigin), by)
	if named := header(d, wire.HeaderClass); named != "" {
		class = named
	}
	return inbox.DeadLetter{
		Message:       *m,
		Class:         class,
		Attempts:      m.Attempt,
		FirstFailedAt: m.FirstFailedAt,
		FailedAt:      timeHeader(d, wire.HeaderLastFailed),
		Error:         header(d, wire.HeaderError),
		ErrorType:     header(d, wire.HeaderErrorType),
		SQLState:      header(d, wire.HeaderSQLState),
		Fingerprint:   header(d, wire.HeaderFingerprint),
		Consumer:      header(d, wire.HeaderConsumer),
	}
}

func timeText(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

const (
	// maxMoves is the number of copies that are published together.
	maxMoves = 64
	// copyWindow is the number of copies that may await their confirms, from several Moves and from messages that
	// pass through.
	copyWindow = 4 * maxMoves
	// shutdownPatience is the time that Run waits for confirms when it ends.
	shutdownPatience = time.Second
)

// copier publishes copies of messages, on a connection of its own.
type copier struct {
	cfg       *settings
	publisher *amqpconn.Publisher
}

func newCopier(dial amqpconn.Dial, cfg *settings) *copier {
	if cfg.copies != nil {
		dial = cfg.copies
	}
	return &copier{cfg, amqpconn.NewPublisher(amqpconn.PublisherConfig{
		Dial: dial, Timeout: cfg.Timeout, Logger: cfg.Logger,
		Window: copyWindow, ConfirmTimeout: cfg.confirmTimeout, ShutdownTimeout: shutdownPatience,
	})}
}

// outgoing is a copy to publish, and later its outcome.
type outgoing struct {
	exchange, key string
	copied        amqp.Publishing
	note          string // the queue for the note of a waiting copy; empty: the copy does not wait
	err           error
}

// place returns the destination of the copy.
func (o *outgoing) place() string {
	if o.exchange == "" {
		return "queue " + strconv.Quote(o.key)
	}
	return fmt.Sprintf("exchange %q", o.exchange)
}

// outgoing returns the copy for a move.
func (c *copier) outgoing(d *delivery, m driver.Move) *outgoing {
	switch m.Target {
	case driver.ToDead:
		return &outgoing{key: c.cfg.deadLetterQueue(m.DeadLetter.Class), copied: deadCopy(d.raw, m.DeadLetter)}
	case driver.ToLater:
		return c.cfg.toWait(d.session.src.queue, nextCopy(d.raw, d.Message(), m.Next), m.Delay, m.PutOff)
	default:
		return &outgoing{key: d.session.src.queue, copied: nextCopy(d.raw, d.Message(), m.Next)}
	}
}

// publish publishes copies and waits for all outcomes. Copies that are too large for the broker lose headers, step
// by step.
func (c *copier) publish(ctx context.Context, outs []*outgoing) {
	defer c.leave(ctx, outs)
	for step := 0; len(outs) > 0; step++ {
		c.publishOnce(ctx, outs)
		if step == len(cuts) {
			return
		}
		var again []*outgoing
		for _, out := range outs {
			if errors.Is(out.err, amqpconn.ErrInvalid) {
				cuts[step](out.copied.Headers)
				again = append(again, out)
			}
		}
		outs = again
	}
}

func (c *copier) publishOnce(ctx context.Context, outs []*outgoing) {
	var under sync.WaitGroup
	under.Add(len(outs))
	for _, out := range outs {
		c.publisher.Publish(ctx, amqpconn.Out{Exchange: out.exchange, Key: out.key, Message: out.copied}, func(err error) {
			out.err = err
			under.Done()
		})
	}
	under.Wait()
}

// result converts the outcome to the errors of driver.Source.
func (o *outgoing) result() error {
	switch {
	case o.err == nil:
		return nil
	case unavailable(o.err):
		return fmt.Errorf("%w: %w", driver.ErrUnavailable, o.err)
	case errors.Is(o.err, amqpconn.ErrInvalid):
		return fmt.Errorf("%s: %w: %w", o.place(), driver.ErrTooLarge, o.err)
	default:
		return fmt.Errorf("%s: %w: %w", o.place(), driver.ErrRefused, o.err)
	}
}

// unavailable reports whether no copies can be published for now.
func unavailable(err error) bool {
	return errors.Is(err, amqpconn.ErrUnavailable) || errors.Is(err, amqpconn.ErrBlocked)
}

const (
	// passPause is the interval at which unpublishable messages are tried again.
	passPause = 250 * time.Millisecond
	// refusedPause is the pause between two messages whose delay queue is missing or closed to this user. Each
	// goes to the end of the consumer's own queue, and is delivered again.
	refusedPause = 50 * time.Millisecond
	// refusedAge is how long Ready reports such a queue.
	refusedAge = 15 * time.Second
	// maxRenewals bounds how often a session replaces its consumer because of messages that wait to pass through.
	maxRenewals = 4
)

// passing contains the messages of all sessions whose delay is longer than the longest delay queue. They pass from
// one delay queue to the next. Only the transport handles them.
type passing struct {
	copies  *copier
	wake    chan struct{}
	seldom  telemetry.Seldom
	mu      sync.Mutex
	waiting []*delivery
	last    error // the last rejection by a delay queue
	when    time.Time
}

func newPassing(copies *copier) *passing {
	return &passing{copies: copies, wake: make(chan struct{}, 1)}
}

// add adds messages.
func (p *passing) add(ds ...*delivery) {
	p.mu.Lock()
	p.waiting = append(p.waiting, ds...)
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take returns some of the messages. It drops messages of sessions that have ended, because the broker delivers
// them again.
func (p *passing) take() (ds []*delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rest := p.waiting[:0]
	for _, d := range p.waiting {
		switch {
		case d.session.gone():
		case len(ds) < maxMoves:
			ds = append(ds, d)
		default:
			rest = append(rest, d)
		}
	}
	clear(p.waiting[len(rest):])
	p.waiting = rest
	return ds
}

// refuse records a rejection by a delay queue.
func (p *passing) refuse(err error, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.when = err, now
}

// refused returns the last rejection by a delay queue, if it is recent.
func (p *passing) refused(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == nil || now.Sub(p.when) > refusedAge {
		return nil
	}
	return fmt.Errorf("a delay queue rejects messages: %w", p.last)
}

// run forwards the messages until ctx ends. The remaining messages stay unsettled.
func (p *passing) run(ctx context.Context) {
	for ctx.Err() == nil {
		ds := p.take()
		if len(ds) == 0 {
			select {
			case <-p.wake:
			case <-ctx.Done():
			}
			continue
		}
		if p.forward(ctx, ds) {
			_ = runloop.Sleep(ctx, passPause) // the loop checks ctx
		}
	}
}

// forward publishes copies of messages for the rest of their delays. It returns true if some cannot be published
// for now.
func (p *passing) forward(ctx context.Context, ds []*delivery) (later bool) {
	outs := make([]*outgoing, len(ds))
	for i, d := range ds {
		copied := duplicate(d.raw)
		outs[i] = p.copies.cfg.toWait(d.session.src.queue, copied, d.wait, copied.Headers[wire.HeaderPutOff] != nil)
	}
	p.copies.publish(ctx, outs)
	for i, out := range outs {
		switch {
		case out.err == nil:
			p.passed(ctx, ds[i])
		case unavailable(out.err):
			later = true
			p.keep(ds[i])
		default:
			p.detour(ctx, ds[i], out.result())
		}
	}
	return later
}

// passed acknowledges the original of a message that is stored elsewhere.
func (p *passing) passed(ctx context.Context, d *delivery) {
	d.session.passing.Add(-1)
	_ = d.session.Ack(ctx, []driver.Delivery{d}, false) // a redelivered original passes through again
}

// keep puts a message back to wait. It notifies the receiver if such messages fill half of its window.
func (p *passing) keep(d *delivery) {
	p.add(d)
	if d.session.passing.Load() >= d.session.most.Load() {
		select {
		case d.session.crowded <- struct{}{}:
		default:
		}
	}
}

// detour moves a message to the end of its own queue, because its delay queue rejected it.
func (p *passing) detour(ctx context.Context, d *delivery, why error) {
	p.refuse(why, time.Now())
	if repeats, due := p.seldom.Due(); due {
		p.copies.cfg.Logger.ErrorContext(ctx, "delay queue rejected a message: moved behind others", slog.Any("error", why), slog.Int("repeats", repeats))
	}
	_ = runloop.Sleep(ctx, refusedPause) // the following calls check ctx
	out := &outgoing{key: d.session.src.queue, copied: duplicate(d.raw)}
	p.copies.publish(ctx, []*outgoing{out})
	if out.err == nil {
		p.passed(ctx, d)
		return
	}
	p.keep(d)
}

// All consumers share the delay queues, so the depths of these do not show how many messages of one consumer wait.
// Therefore each waiting message has a note, an empty message, in a queue of its consumer. The process that
// receives the returned message removes one note. If a process crashes between the two, its note remains until
// noteAge.

const (
	// noteAge is the lifetime of a note: longer than the longest step of the ladder.
	noteAge = time.Hour
	// notesAtOnce bounds the notes that are removed within the timeout of one call.
	notesAtOnce = 100
)

// noteQueue returns the queue for the notes of failed messages, or of messages that were put off.
func (s *settings) noteQueue(putOff bool) string {
	if putOff {
		return s.queue + ".putoff"
	}
	return s.queue + ".retrying"
}

func (s *settings) noteQueues() (specs []queueSpec) {
	for _, putOff := range []bool{false, true} {
		specs = append(specs, queueSpec{name: s.noteQueue(putOff), kind: s.queueType(), use: noted, args: amqp.Table{"x-message-ttl": noteAge.Milliseconds()}})
	}
	return specs
}

// leave publishes the notes of waiting messages. It does not wait for the confirms; a failure only makes a count
// wrong.
func (c *copier) leave(ctx context.Context, outs []*outgoing) {
	for _, out := range outs {
		if out.err == nil && out.note != "" {
			c.publisher.Publish(ctx, amqpconn.Out{Key: out.note, Message: amqp.Publishing{DeliveryMode: amqp.Persistent}}, func(error) {})
		}
	}
}

// noteOf returns the queue that has a note of a delivery, or "". The note of a redelivered message was removed
// earlier.
func (s *settings) noteOf(d amqp.Delivery) string {
	if d.Redelivered || d.Headers[wire.HeaderDelay] == nil {
		return ""
	}
	return s.noteQueue(d.Headers[wire.HeaderPutOff] != nil)
}

// notes removes the notes of returned messages, on a goroutine that runs while there are any.
type notes struct {
	conn *amqpconn.Conn

	mu      sync.Mutex
	due     map[string]int // notes to remove, by queue
	running bool
	over    bool
	done    sync.WaitGroup
}

func newNotes(conn *amqpconn.Conn) *notes { return &notes{conn: conn, due: map[string]int{}} }

// take removes one note from a queue, on the goroutine.
func (n *notes) take(queue string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		return
	}
	n.due[queue]++
	if !n.running {
		n.running = true
		n.done.Go(n.run)
	}
}

func (n *notes) run() {
	for queue, count := n.next(); count > 0; queue, count = n.next() {
		err := n.conn.Try(func(ch *amqp.Channel) error {
			for range count {
				if _, found, err := ch.Get(queue, true); err != nil || !found {
					return err
				}
			}
			return nil
		})
		if err != nil { // the queue is missing or the connection has ended; the count is wrong until noteAge
			n.drop(queue)
		}
	}
}

// next returns the number of notes to remove now, and their queue. If the number is zero, the goroutine ends.
func (n *notes) next() (queue string, count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.over {
		for queue, all := range n.due {
			count = min(all, notesAtOnce)
			if n.due[queue] -= count; n.due[queue] == 0 {
				delete(n.due, queue)
			}
			return queue, count
		}
	}
	n.running = false
	return "", 0
}

func (n *notes) drop(queue string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.due, queue)
}

// end stops removing notes. The goroutine ends after its current call.
func (n *notes) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.over = true
}

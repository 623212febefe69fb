package amqpconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// PublisherConfig configures a Publisher. Zero values take the defaults.
type PublisherConfig struct {
	Dial    Dial
	Timeout time.Duration // of the dial and of every call; 0 means 10 s
	Logger  *slog.Logger  // nil means slog.Default()

	// Window is the number of messages that may await their confirms; 0 means 500.
	Window int
	// Channels is the number of channels over which they are spread; 0 means 1. The broker serves each with its
	// own process.
	Channels int
	// ConfirmTimeout is how long a message may await its confirm; 0 means 15 s.
	ConfirmTimeout time.Duration
	// ShutdownTimeout is how long Run waits for open confirms once ctx is cancelled; 0 means 10 s.
	ShutdownTimeout time.Duration
	// Down receives every failed attempt to connect and every ended session. Optional.
	Down func(err error)
	// Up is called each time the publisher becomes ready: a session starts, or the broker unblocks it. It may be
	// nil.
	Up func()
}

// Out is one message to publish. It is published mandatory.
type Out struct {
	// Stripe chooses the channel. Messages of one stripe keep their order.
	Stripe        uint32
	Exchange, Key string
	Message       amqp.Publishing
}

// Publisher publishes with confirms in a sliding window, on its own connection. Its methods may be called from any
// goroutine.
type Publisher struct {
	cfg      PublisherConfig
	suspects *suspects
	again    sync.WaitGroup // goroutines that publish again
	refusals telemetry.Seldom

	mu      sync.Mutex
	session *session      // nil while there is none
	err     error         // why there is no session
	soon    bool          // a session is being opened; callers wait for it
	changed chan struct{} // closed and replaced when a field above changes
}

var errNotRunning = errors.New("the publisher is not running")

// NewPublisher returns a publisher that connects once Run is called.
func NewPublisher(cfg PublisherConfig) *Publisher {
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	cfg.Window = cmp.Or(cfg.Window, 500)
	cfg.Channels = cmp.Or(cfg.Channels, 1)
	cfg.ConfirmTimeout = cmp.Or(cfg.ConfirmTimeout, 15*time.Second)
	cfg.ShutdownTimeout = cmp.Or(cfg.ShutdownTimeout, 10*time.Second)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return &Publisher{cfg: cfg, suspects: newSuspects(), changed: make(chan struct{}), err: errNotRunning, soon: true}
}

// Run keeps a session open until ctx is cancelled. Then it accepts no more messages, waits for the open confirms
// and closes the connection.
func (p *Publisher) Run(ctx context.Context) {
	defer p.again.Wait()
	defer p.set(nil, errNotRunning)
	Loop(ctx, LoopConfig{
		Dial: p.cfg.Dial, Timeout: p.cfg.Timeout, Logger: p.cfg.Logger,
		Down: func(err error) {
			p.set(nil, err)
			if p.cfg.Down != nil {
				p.cfg.Down(err)
			}
		},
	}, p.serve)
}

// serve publishes on one connection.
func (p *Publisher) serve(ctx context.Context, conn *Conn) error {
	conn.onUnblock(p.up)
	s, err := openSession(ctx, conn, p)
	if err != nil {
		return err
	}
	defer s.facts.close()
	defer conn.Close()
	p.set(s, nil)
	p.up()
	return s.run(ctx, func() { p.set(nil, errNotRunning) })
}

func (p *Publisher) up() {
	if p.cfg.Up != nil {
		p.cfg.Up()
	}
}

func (p *Publisher) set(s *session, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.session, p.err, p.soon = s, err, errors.Is(err, errRefused)
	close(p.changed)
	p.changed = make(chan struct{})
}

// Ready returns nil while there is a session that the broker has not blocked.
func (p *Publisher) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == nil {
		return unavailable(p.err)
	}
	if reason, isBlocked := p.session.conn.Blocked(); isBlocked {
		return blocked(reason)
	}
	return nil
}

// Window returns the number of messages that await their confirms, and the maximum.
func (p *Publisher) Window() (used, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != nil {
		used = len(p.session.slots)
	}
	return used, p.cfg.Window
}

// Publish sends a message and calls done exactly once: with nil after the broker confirmed it, otherwise with one
// of the package's errors. It may wait while the window is full, until ctx is cancelled; unconfirmed messages are
// then reported as ErrUnavailable soon after. Messages of one caller and stripe are sent in the order of its
// calls. The exception: messages in flight when the broker refused another message are sent again. Without a
// session Publish fails at once. It waits only for the very first attempt to connect, and for the one after a
// refusal, up to the Timeout. Done must neither wait nor publish.
func (p *Publisher) Publish(ctx context.Context, out Out, done func(error)) {
	if err := validate(out); err != nil {
		done(err)
		return
	}
	p.publish(&entry{ctx: ctx, out: out, answer: done})
}

func (p *Publisher) publish(e *entry) {
	var over *session
	for {
		s, err := p.current(e.ctx, over)
		if err == nil {
			err = s.publish(e)
		}
		switch {
		case err == nil:
			return
		case errors.Is(err, errRefused): // because of another message
			over = s
		default:
			e.answer(err)
			return
		}
	}
}

// publishAgain publishes messages that were not at fault when their channel was closed.
func (p *Publisher) publishAgain(rest []*entry) {
	if len(rest) == 0 {
		return
	}
	p.again.Go(func() {
		for _, e := range rest {
			p.publish(e)
		}
	})
}

// Confirmed publishes and waits for the outcome.
func (p *Publisher) Confirmed(ctx context.Context, out Out) error {
	outcome := make(chan error, 1)
	p.Publish(ctx, out, func(err error) { outcome <- err })
	return <-outcome
}

// current returns the open session unless it is over, and waits for a session that is being opened.
func (p *Publisher) current(ctx context.Context, over *session) (*session, error) {
	var timeout <-chan time.Time
	for {
		p.mu.Lock()
		s, err, soon, changed := p.session, p.err, p.soon, p.changed
		p.mu.Unlock()
		switch {
		case s != nil && s != over:
			return s, nil
		case s == nil && !soon:
			return nil, unavailable(err)
		case timeout == nil:
			timer := time.NewTimer(p.cfg.Timeout)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-changed:
		case <-timeout:
			return nil, unavailable(err)
		case <-ctx.Done():
			return nil, unavailable(ctx.Err())
		}
	}
}

// The errors of Publisher. Each error of its methods matches exactly one.
var (
	// ErrInvalid means that the message can never be sent.
	ErrInvalid = errors.New("not a valid message")
	// ErrUnroutable means that no queue is bound for the message, its exchange does not exist, or this user may
	// not publish there.
	ErrUnroutable = errors.New("no queue takes it")
	// ErrNacked means that the broker refused the message, without a reason that shows whether it ever will accept
	// it.
	ErrNacked = errors.New("nacked")
	// ErrBlocked means that the broker accepts no messages for now, because of a resource alarm.
	ErrBlocked = errors.New("blocked by the broker")
	// ErrUnavailable means that there is no connection, or that it ended before the confirm. The broker may or may
	// not have the message.
	ErrUnavailable = errors.New("broker unavailable")
)

func unavailable(cause error) error {
	if cause == nil {
		return ErrUnavailable
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, cause)
}

func blocked(reason string) error { return fmt.Errorf("%w: %s", ErrBlocked, reason) }

const (
	// maxShort is the length of AMQP's short strings. The client breaks the connection because of a longer one.
	maxShort = 255
	// maxHeaders bounds the headers of one message. They must fit into one frame, 128 KiB on a broker with default
	// settings.
	maxHeaders = 64 << 10
	// MaxBody bounds the body of one message: RabbitMQ's default limit.
	MaxBody = 128 << 20
)

// further lists the headers from which RabbitMQ reads more routing keys.
var further = [...]string{"CC", "BCC"}

// validate rejects messages that would close the channel, or the connection, for all.
func validate(out Out) error {
	m := out.Message
	for _, short := range [...]struct{ what, value string }{
		{"exchange", out.Exchange},
		{"routing key", out.Key},
		{"message id", m.MessageId},
		{"type", m.Type},
		{"content type", m.ContentType},
		{"content encoding", m.ContentEncoding},
		{"correlation id", m.CorrelationId},
		{"reply-to", m.ReplyTo},
		{"app id", m.AppId},
		{"user id", m.UserId},
	} {
		if len(short.value) > maxShort {
			return fmt.Errorf("%w: %s of %d bytes, at most %d are allowed", ErrInvalid, short.what, len(short.value), maxShort)
		}
	}
	if len(m.Body) > MaxBody {
		return fmt.Errorf("%w: body of %d bytes, at most %d are allowed", ErrInvalid, len(m.Body), MaxBody)
	}
	for _, name := range further {
		if _, list := m.Headers[name].([]any); m.Headers[name] != nil && !list {
			return fmt.Errorf("%w: the header %s must be a list for RabbitMQ", ErrInvalid, name)
		}
	}
	if err := m.Headers.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	size, err := tableSize(m.Headers)
	if err == nil && size > maxHeaders {
		err = fmt.Errorf("headers of %d bytes, at most %d are allowed", size, maxHeaders)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// maxProperties is an upper bound of the frame of any message's properties.
const maxProperties = maxHeaders + 16*(maxShort+1)

// propertiesSize returns an upper bound of the frame of a message's properties.
func propertiesSize(m amqp.Publishing) int {
	size := 64 // fields of fixed size
	for _, short := range [...]string{
		m.ContentType, m.ContentEncoding, m.CorrelationId, m.ReplyTo, m.Expiration, m.MessageId, m.Type, m.UserId, m.AppId,
	} {
		size += 1 + len(short)
	}
	headers, _ := tableSize(m.Headers) // validate has reported the error
	return size + headers
}

// tableSize returns an upper bound of the size of a table on the wire, without its length.
func tableSize(t amqp.Table) (int, error) {
	size := 0
	for key, value := range t {
		if len(key) > maxShort {
			return 0, fmt.Errorf("header name of %d bytes, at most %d are allowed", len(key), maxShort)
		}
		n, err := valueSize(value)
		if err != nil {
			return 0, err
		}
		size += 1 + len(key) + n
	}
	return size, nil
}

// valueSize includes the byte for the type.
func valueSize(value any) (int, error) {
	const number, length = 1 + 8, 1 + 4
	switch v := value.(type) {
	case string:
		return length + len(v), nil
	case []byte:
		return length + len(v), nil
	case amqp.Table:
		n, err := tableSize(v)
		return length + n, err
	case []any:
		size := length
		for _, item := range v {
			n, err := valueSize(item)
			if err != nil {
				return 0, err
			}
			size += n
		}
		return size, nil
	default:
		return number, nil
	}
}

// session is a connection with its publishing channels, which share the places for unconfirmed messages. A channel
// that the broker closed because of a message is replaced; after any other failure the whole session ends.
type session struct {
	p     *Publisher
	conn  *Conn
	facts *facts
	slots chan struct{} // taken by unconfirmed messages

	mu      sync.Mutex
	windows []*window
	refused error // set if the broker closed the connection because of a message
}

// openSession opens the channels. When ctx ends, the session and its connection end.
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

// pending returns the number of unconfirmed body bytes.
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

// serve runs one window after the other. Each replaces a window whose channel the broker closed because of a
// message. Messages that were in flight there and are not at fault are published again.
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
			s.p.cfg.Logger.WarnContext(ctx, "RabbitMQ refused a message", slog.Any("error", err), slog.Int("repeats", repeats))
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

// note records that the broker has closed the whole connection because of a message.
func (s *session) note(w *window, err error) {
	if !w.verdict.overMessage() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
}

// publish puts a message into its window. The error is errRefused if the session is ending because of another
// message.
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

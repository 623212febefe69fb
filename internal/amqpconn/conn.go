// Package amqpconn is shared by the RabbitMQ adapters. It has connections that are replaced instead of repaired,
// and a pipelined publisher on top of them.
//
// The client's own recovery reopens the same channel object, whose delivery tags start again at 1. A late
// acknowledgement of an old delivery would then settle a new message that nobody has processed. So a connection
// here lives for one session. After any fault it is discarded and a new one is dialled (Loop).
//
// One case is not a fault of the connection. RabbitMQ closes the channel of a message that it refuses, because of
// the exchange, the topic or the size, and loses track of all other messages on that channel. The publisher opens
// another channel, publishes those messages again, and fails the message that the broker's reply names. If the
// reply names none, they are published one by one.
//
// The client's calls wait for the broker without a limit. Every waiting call goes through Conn.Within, which
// closes the connection when the call takes too long. When no call waits, Conn.Watch detects a broker that has
// vanished.
package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Dial opens a new connection. It must not use the client's own recovery.
type Dial func(ctx context.Context) (*amqp.Connection, error)

// closePatience bounds the closing handshake.
const closePatience = 2 * time.Second

// errSilent is the error of a connection whose broker does not answer.
var errSilent = errors.New("the broker does not answer")

// errRecovery rejects a connection that would repair itself.
var errRecovery = errors.New("the dial function enables the client's own recovery, which can acknowledge messages nobody processed: leave amqp.Config.Recovery nil")

// errURL replaces the error of a URL that cannot be parsed.
var errURL = errors.New("dial: malformed URL (are reserved characters of user and password percent-encoded?)")

// Conn is one connection for one session. Its methods may be called from any goroutine.
type Conn struct {
	raw     *amqp.Connection
	timeout time.Duration
	done    chan struct{}
	err     error // readable once done is closed
	blocked atomic.Pointer[string]
	resumed atomic.Pointer[func()] // called when the broker unblocks the connection
	silent  atomic.Bool            // it was closed because the broker did not answer

	closeOnce sync.Once
}

// Open dials within timeout, which then also bounds every call on the connection. A dial function that ignores its
// context is abandoned; a connection that it opens late is closed.
func Open(ctx context.Context, dial Dial, timeout time.Duration) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	type result struct {
		raw *amqp.Connection
		err error
	}
	results := make(chan result, 1)
	go func() {
		raw, err := dial(ctx)
		results <- result{raw, err}
	}()
	select {
	case r := <-results:
		return wrap(r.raw, r.err, timeout)
	case <-ctx.Done():
		go func() {
			if r := <-results; r.raw != nil {
				_ = r.raw.CloseDeadline(time.Now().Add(closePatience))
			}
		}()
		return nil, fmt.Errorf("dial: %w", ctx.Err())
	}
}

func wrap(raw *amqp.Connection, err error, timeout time.Duration) (*Conn, error) {
	switch {
	case isParseError(err):
		return nil, errURL // the text quotes the URL with the password
	case err != nil && strings.HasPrefix(err.Error(), "dial "): // as package net begins
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("dial: %w", err)
	case raw == nil:
		return nil, errors.New("dial: the function returned no connection")
	case raw.IsRecoveryEnabled():
		_ = raw.CloseDeadline(time.Now().Add(closePatience))
		return nil, errRecovery
	}
	c := &Conn{raw: raw, timeout: timeout, done: make(chan struct{})}
	// Buffered, because the client sends to them while it holds its own locks.
	closes := raw.NotifyClose(make(chan *amqp.Error, 1))
	blocks := raw.NotifyBlocked(make(chan amqp.Blocking, 16))
	go c.watch(closes, blocks)
	return c, nil
}

func isParseError(err error) bool {
	e, ok := errors.AsType[*url.Error](err)
	return ok && e.Op == "parse"
}

// watch ends with the connection, because the client then closes both channels.
func (c *Conn) watch(closes <-chan *amqp.Error, blocks <-chan amqp.Blocking) {
	defer close(c.done)
	for {
		select {
		case err := <-closes:
			c.err = c.reason(err)
			return
		case b, open := <-blocks:
			switch {
			case !open:
				blocks = nil
			case b.Active:
				c.blocked.Store(&b.Reason)
			default:
				c.blocked.Store(nil)
				if resumed := c.resumed.Load(); resumed != nil {
					(*resumed)()
				}
			}
		}
	}
}

// reason returns why the connection has ended, as far as the client knows.
func (c *Conn) reason(err *amqp.Error) error {
	switch {
	case c.silent.Load():
		return errSilent
	case err != nil:
		return err
	default:
		return amqp.ErrClosed
	}
}

// Done is closed when the connection has ended for any reason.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Silent reports whether the connection was ended because the broker did not answer.
func (c *Conn) Silent() bool { return c.silent.Load() }

// Err returns why the connection ended. It must be called after Done is closed.
func (c *Conn) Err() error { return c.err }

// Blocked returns the broker's reason while it has stopped reading from the connection.
func (c *Conn) Blocked() (reason string, blocked bool) {
	if r := c.blocked.Load(); r != nil {
		return *r, true
	}
	return "", false
}

// onUnblock registers f to be called when the broker unblocks the connection.
func (c *Conn) onUnblock(f func()) { c.resumed.Store(&f) }

// Channel opens a channel.
func (c *Conn) Channel() (*amqp.Channel, error) {
	var ch *amqp.Channel
	err := c.Within(func() (err error) {
		ch, err = c.raw.Channel()
		return err
	})
	return ch, err
}

// Within runs a call that waits for the broker. If it takes longer than the connection's timeout, Within closes
// the connection, which ends the call.
func (c *Conn) Within(call func() error) error {
	killed := make(chan struct{})
	timer := time.AfterFunc(c.timeout, func() {
		defer close(killed)
		c.kill()
	})
	err := call()
	if timer.Stop() {
		return err
	}
	<-killed
	return fmt.Errorf("no answer within %v: %w", c.timeout, errors.Join(err, amqp.ErrClosed))
}

// Try runs do on its own channel, for requests that the broker may refuse by closing the channel.
func (c *Conn) Try(do func(ch *amqp.Channel) error) error {
	ch, err := c.Channel()
	if err != nil {
		return err
	}
	return c.Within(func() error {
		defer func() { _ = ch.Close() }() // after a refusal it is closed already
		return do(ch)
	})
}

// Close closes the connection and waits for that, a few seconds at most.
func (c *Conn) Close() { c.end(closePatience) }

// kill closes the connection of a silent broker without the closing handshake.
func (c *Conn) kill() {
	c.silent.Store(true)
	c.end(0)
}

func (c *Conn) end(patience time.Duration) {
	c.closeOnce.Do(func() {
		// An error means that the connection has ended already, or that the broker did not answer the handshake.
		// It is closed in both cases.
		_ = c.raw.CloseDeadline(time.Now().Add(patience))
	})
	select {
	case <-c.done:
	case <-time.After(closePatience):
	}
}

// Use opens a connection, runs do on it and closes it.
func Use(ctx context.Context, dial Dial, timeout time.Duration, do func(*Conn) error) error {
	conn, err := Open(ctx, dial, timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, conn.Close)
	defer stop()
	if err := do(conn); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return nil
}

// DialURL returns a Dial to the broker at url, like amqp.DialConfig with cfg. Its connections combine small writes
// into few system calls.
func DialURL(url string, cfg amqp.Config) Dial {
	return func(ctx context.Context) (*amqp.Connection, error) {
		cfg := cfg
		cfg.TLSClientConfig = cfg.TLSClientConfig.Clone() // the client writes to it
		cfg.Properties = maps.Clone(cfg.Properties)       // and to these
		connect := cfg.Dial
		if connect == nil {
			connect = connectWithin(ctx)
		}
		cfg.Dial = func(network, addr string) (net.Conn, error) {
			conn, err := connect(network, addr)
			if err != nil {
				return nil, err
			}
			return GatherWrites(conn), nil
		}
		return amqp.DialConfig(url, cfg)
	}
}

// connectWithin dials like amqp.DefaultDial, with the deadline of ctx, which the client removes after the
// handshakes.
func connectWithin(ctx context.Context) func(network, addr string) (net.Conn, error) {
	return func(network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if deadline, ok := ctx.Deadline(); ok {
			err = conn.SetDeadline(deadline)
		}
		return conn, err
	}
}

const (
	// pulseInterval is the time between a reply and the next poll.
	pulseInterval = 2 * time.Second
	// pulsePatience is the time that a reply may take.
	pulsePatience = 5 * time.Second
	// slowest is the rate, in bytes per second, at which a connection still counts as working.
	slowest = 1 << 20
)

// Watch polls the broker every two seconds until the connection ends. It closes the connection if a reply takes
// longer than five seconds. Without Watch, a connection to a vanished broker would stay open until the client's
// heartbeats notice it, after 15 seconds or later.
//
// Pending returns the bytes in transit. Each MiB allows one more second; nil counts none. While the broker blocks
// the connection it does not answer, and Watch does not expect it.
func (c *Conn) Watch(pending func() int) error {
	ch, err := c.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	go c.watchAnswers(ch, pending)
	return nil
}

func (c *Conn) watchAnswers(ch *amqp.Channel, pending func() int) {
	next := time.NewTimer(pulseInterval)
	defer next.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-next.C:
		}
		if !c.answers(ch, pending) {
			c.kill()
			return
		}
		next.Reset(pulseInterval)
	}
}

// answers polls once. It waits in two halves, so that a pause of this process counts as one half.
func (c *Conn) answers(ch *amqp.Channel, pending func() int) bool {
	answered := make(chan error, 1)
	go func() { answered <- ch.Qos(0, 0, false) }() // changes nothing, and ends with the connection
	patience := pulsePatience
	if pending != nil {
		patience += time.Duration(pending()) * time.Second / slowest
	}
	for silent := 0; silent < 2; {
		_, before := c.Blocked()
		select {
		case <-answered: // an error is a reply too
			return true
		case <-c.done:
			return true
		case <-time.After(patience / 2):
		}
		if _, now := c.Blocked(); !before && !now {
			silent++
		}
	}
	return false
}

// ExchangeExists asks the broker. The default exchange always exists. RabbitMQ 4.2.6 and later reply only to users
// with a permission on the name, and refuse others: IsRefused holds for that error.
func (c *Conn) ExchangeExists(name string) (bool, error) {
	if name == "" {
		return true, nil
	}
	return exists(c.Try(func(ch *amqp.Channel) error {
		// In a passive declaration RabbitMQ ignores everything but the name.
		return ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil)
	}))
}

// QueueExists asks the broker, like ExchangeExists.
func (c *Conn) QueueExists(name string) (bool, error) {
	return exists(c.Try(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		return err
	}))
}

func exists(err error) (bool, error) {
	if IsNotFound(err) {
		return false, nil
	}
	if IsRefused(err) {
		return false, fmt.Errorf("no permission to see whether it exists: %w", err)
	}
	return err == nil, err
}

// View is a Check's view of a broker. It collects the names that are hidden from the user.
type View struct {
	Conn   *Conn
	hidden []string
}

// Presence reports whether a queue or an exchange exists.
type Presence int

// Hidden: the user has no permission on the name, so a broker since 4.2.6 does not answer.
const (
	Exists Presence = iota
	Missing
	Hidden
)

// Exchange looks for an exchange.
func (v *View) Exchange(name string) (Presence, error) {
	exists, err := v.Conn.ExchangeExists(name)
	return v.saw(name, exists, err)
}

// Queue looks for a queue.
func (v *View) Queue(name string) (Presence, error) {
	exists, err := v.Conn.QueueExists(name)
	return v.saw(name, exists, err)
}

func (v *View) saw(name string, exists bool, err error) (Presence, error) {
	switch {
	case IsRefused(err):
		v.hidden = append(v.hidden, name)
		return Hidden, nil
	case err != nil:
		return Hidden, err
	case exists:
		return Exists, nil
	}
	return Missing, nil
}

// Report adds one finding for all names that were hidden.
func (v *View) Report(found *check.Findings) {
	if len(v.hidden) > 0 {
		found.Add("call Check as the user that calls Setup, or grant a permission on them",
			"the user has no permission on %d queues or exchanges, so they were not checked: %s", len(v.hidden), strings.Join(v.hidden, ", "))
	}
}

// IsRefused reports whether the broker answered that the user lacks a permission.
func IsRefused(err error) bool {
	reply, ok := errors.AsType[*amqp.Error](err)
	return ok && reply.Code == amqp.AccessRefused
}

// IsNotFound reports whether the broker answered that a queue or an exchange does not exist.
func IsNotFound(err error) bool {
	var reply *amqp.Error
	return errors.As(err, &reply) && reply.Code == amqp.NotFound
}

// If the leader of a quorum queue does not reply within statPatience, the broker itself replies that the queue has
// no messages and no consumers. Count recognizes such a reply by its duration, and asks again, countAsks times at
// most.
const (
	statPatience = 250 * time.Millisecond
	countAsks    = 8
	countPause   = 50 * time.Millisecond
	// farAsks is the number of requests after which a queue counts as far away. A single one may be slow by
	// chance.
	farAsks = 3
)

// Count returns the number of messages of a queue that are ready for delivery, and of its consumers. A queue that
// does not exist has none. It returns an error if the queue is too busy to answer, after about 2.5 seconds. A
// quorum queue without a leader, because most of its nodes are down, also has none: the broker replies so at once.
func (c *Conn) Count(name string) (amqp.Queue, error) {
	trips, answers := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64) // the shortest of each
	for n := 1; ; n++ {
		q, trip, took, err := c.stat(name)
		if IsNotFound(err) {
			return q, nil
		}
		trips, answers = min(trips, trip), min(answers, took)
		far := n >= farAsks && answers-trips < statPatience/2 // the network alone takes as long
		switch told := q.Messages > 0 || q.Consumers > 0 || took < statPatience || far; {
		case err != nil || told:
			return q, err
		case n < countAsks:
			time.Sleep(countPause)
		default:
			return q, fmt.Errorf("queue %q is too busy to count its messages", name)
		}
	}
}

// stat asks once. It measures a round trip that does not reach the queue, and one that does.
func (c *Conn) stat(name string) (q amqp.Queue, trip, took time.Duration, err error) {
	begun := time.Now()
	err = c.Try(func(ch *amqp.Channel) (err error) {
		open := time.Now()
		trip = open.Sub(begun)
		q, err = ch.QueueDeclarePassive(name, true, false, false, false, nil)
		took = time.Since(open)
		return err
	})
	return q, trip, took, err
}

// stable is the duration of a session after which its end counts as the first failure again.
const stable = time.Second

// pauses is the backoff between two sessions: 0.1 s growing to 2 s, spread by half. It is short, because a backoff
// outlasts its fault.
var pauses = backoff.Policy{Base: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// errRefused ends a session because the broker refused a message. The next session starts at once.
var errRefused = errors.New("the broker has refused a message")

// LoopConfig configures Loop.
type LoopConfig struct {
	Dial    Dial
	Timeout time.Duration // of the dial and of every call
	Logger  *slog.Logger
	// Down receives every failed attempt and every ended session. Optional.
	Down func(err error)
}

// Loop runs one session after the other, each on its own connection that is closed afterwards, with a growing
// backoff. It returns when ctx is cancelled, or when a session returns nil because it has nothing left to do. The
// broker may be down when Loop starts.
func Loop(ctx context.Context, cfg LoopConfig, session func(context.Context, *Conn) error) {
	var seldom telemetry.Seldom
	for failures := 0; ctx.Err() == nil; failures++ {
		began := time.Now()
		err := one(ctx, cfg, session)
		if err == nil || ctx.Err() != nil {
			return
		}
		if cfg.Down != nil {
			cfg.Down(err)
		}
		if errors.Is(err, errRefused) {
			failures = -1
			continue
		}
		if time.Since(began) > stable {
			failures = 0
		}
		pause := pauses.Delay(failures, rand.Float64())
		if repeats, ok := seldom.Due(); ok {
			cfg.Logger.WarnContext(ctx, "no session with RabbitMQ", slog.Any("error", err),
				slog.Int("failures", failures+1), slog.Duration("again_in", pause), slog.Int("repeats", repeats))
		}
		if runloop.Sleep(ctx, pause) != nil {
			return
		}
	}
}

func one(ctx context.Context, cfg LoopConfig, session func(context.Context, *Conn) error) error {
	conn, err := Open(ctx, cfg.Dial, cfg.Timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	return session(ctx, conn)
}

const (
	// maxGathered is the number of bytes that may wait for the socket before Write waits too.
	maxGathered = 256 << 10
	// flushPatience is how long Close waits for them.
	flushPatience = time.Second
)

// gatherer is a connection with a goroutine for its writes. Bytes that arrive during one system call are written
// by the next one. The client makes one call per message, which is most of the cost of a message.
type gatherer struct {
	net.Conn
	ended chan struct{} // the goroutine has returned

	mu      sync.Mutex
	changed sync.Cond
	buf     []byte
	err     error // the error after which nothing can be written
}

// GatherWrites wraps a new connection. A write returns before it is done, and reports the failure of an earlier
// one. Close ends the goroutine.
func GatherWrites(conn net.Conn) net.Conn {
	g := &gatherer{Conn: conn, ended: make(chan struct{})}
	g.changed.L = &g.mu
	go g.run()
	return g
}

// Write copies the bytes. It waits while too many bytes wait for the socket.
func (g *gatherer) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.buf) >= maxGathered && g.err == nil {
		g.changed.Wait()
	}
	if g.err != nil {
		return 0, g.err
	}
	g.buf = append(g.buf, p...)
	g.changed.Broadcast()
	return len(p), nil
}

func (g *gatherer) run() {
	defer close(g.ended)
	var sent []byte
	for {
		batch, ok := g.next(sent)
		if !ok {
			return
		}
		if _, err := g.Conn.Write(batch); err != nil {
			g.fail(err)
			return
		}
		sent = batch
	}
}

// next waits for bytes and returns them; it reuses the buffer of those sent before. It returns false when
// everything is written and the connection is closed.
func (g *gatherer) next(sent []byte) ([]byte, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.buf) == 0 && g.err == nil {
		g.changed.Wait()
	}
	batch := g.buf
	g.buf = sent[:0]
	g.changed.Broadcast()
	return batch, len(batch) > 0
}

// fail keeps the first error and wakes all waiting goroutines.
func (g *gatherer) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = err
	}
	g.changed.Broadcast()
}

// Close writes waiting bytes, for a second at most, and closes the connection.
func (g *gatherer) Close() error {
	g.fail(net.ErrClosed)
	_ = g.Conn.SetWriteDeadline(time.Now().Add(flushPatience)) // fails only on a closed connection
	<-g.ended
	return g.Conn.Close()
}

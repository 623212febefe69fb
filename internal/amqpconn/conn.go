package amqpconn

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Dial opens a new connection. It must not use the client's own recovery.
type Dial func(ctx context.Context) (*amqp.Connection, error)

// closePatience bounds the closing handshake.
const closePatience = 2 * time.Second

// errSilent ends a connection whose broker does not answer.
var errSilent = errors.New("the broker does not answer")

// errRecovery refuses a connection that would repair itself.
var errRecovery = errors.New("the dial function enables the client's own recovery, which can acknowledge messages nobody processed: leave amqp.Config.Recovery nil")

// errURL stands for the error of a URL that cannot be parsed.
var errURL = errors.New("dial: malformed URL (are reserved characters of user and password percent-encoded?)")

// Conn is one connection for one session. Its methods may be called from any goroutine.
type Conn struct {
	raw     *amqp.Connection
	timeout time.Duration
	done    chan struct{}
	err     error // readable once done is closed
	blocked atomic.Pointer[string]
	resumed atomic.Pointer[func()] // called when the broker blocks no longer
	silent  atomic.Bool            // it was ended because the broker does not answer

	closeOnce sync.Once
}

// Open dials within timeout, which then also bounds every call on the connection.
// A dial function that ignores its context is left behind; what it opens late is closed.
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
		return nil, errURL // the text quotes the URL, password and all
	case err != nil:
		return nil, fmt.Errorf("dial: %w", err)
	case raw == nil:
		return nil, errors.New("dial: the function returned no connection")
	case raw.IsRecoveryEnabled():
		_ = raw.CloseDeadline(time.Now().Add(closePatience))
		return nil, errRecovery
	}
	c := &Conn{raw: raw, timeout: timeout, done: make(chan struct{})}
	// Buffered: the client sends to them while it holds its own locks.
	closes := raw.NotifyClose(make(chan *amqp.Error, 1))
	blocks := raw.NotifyBlocked(make(chan amqp.Blocking, 16))
	go c.watch(closes, blocks)
	return c, nil
}

func isParseError(err error) bool {
	e, ok := errors.AsType[*url.Error](err)
	return ok && e.Op == "parse"
}

// watch ends with the connection, for the client then closes both channels.
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

// reason is why the connection has ended, as well as the client knows.
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

// Done is closed when the connection has ended, for whatever reason.
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

// onUnblock has f called when the broker takes messages again after it has blocked the connection.
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

// Within runs a call that waits for the broker. When it takes longer than the
// connection's timeout, the connection is ended, which ends the call.
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

// Try runs do on a channel of its own, for what the broker may refuse by closing the channel.
func (c *Conn) Try(do func(ch *amqp.Channel) error) error {
	ch, err := c.Channel()
	if err != nil {
		return err
	}
	return c.Within(func() error {
		defer func() { _ = ch.Close() }() // the refusal has closed it already
		return do(ch)
	})
}

// Close ends the connection and waits for that, a few seconds at most.
func (c *Conn) Close() { c.end(closePatience) }

// kill ends the connection of a broker that does not answer, without a farewell.
func (c *Conn) kill() {
	c.silent.Store(true)
	c.end(0)
}

func (c *Conn) end(patience time.Duration) {
	c.closeOnce.Do(func() {
		// An error says that the connection has ended already, or that the broker
		// did not answer the farewell. It is closed either way.
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

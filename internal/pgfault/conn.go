package pgfault

import (
	"io"
	"net"
	"sync"
)

// conn is a connection of a Line. Read and Write may be called at once.
type conn struct {
	net.Conn
	line     *Line
	requests requests // of Write

	mu       sync.Mutex
	replies  replies
	fault    Fault  // of the step that the server is working on
	answers  int    // that the server still gives to it
	expected int    // answers that the client waits for
	invented []byte // a refusal that is not yet read
}

func (c *conn) Write(p []byte) (int, error) {
	c.line.wait()
	executed, answers := c.requests.add(p)
	step, ok := stepOf(executed, c.status())
	if !ok {
		return c.Conn.Write(p)
	}
	switch fault := c.line.step(step); fault {
	case KillBefore:
		c.line.stop()
	case Hold:
		c.line.strike()
		<-c.line.released
	case KillAfter, LoseAfter:
		c.expect(fault, answers, answers)
	case Refuse:
		c.expect(fault, 1, answers)
		return c.instead(p, "SELECT 'refused for a test'::int")
	case Conflict:
		c.expect(fault, 1, answers)
		return c.instead(p, "ROLLBACK")
	}
	return c.Conn.Write(p)
}

// instead has the server do something else, and the client believe that p was sent.
func (c *conn) instead(p []byte, sql string) (int, error) {
	if _, err := c.Conn.Write(query(sql)); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c *conn) status() byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.replies.status
}

func (c *conn) backend() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.replies.backend
}

func (c *conn) expect(fault Fault, answers, expected int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault, c.answers, c.expected = fault, answers, expected
}

func (c *conn) Read(p []byte) (int, error) {
	for {
		if n := c.readInvented(p); n > 0 {
			return n, nil
		}
		c.line.wait()
		n, err := c.Conn.Read(p)
		c.line.wait()
		passed, fault := c.received(p[:n])
		switch fault {
		case KillAfter:
			c.line.stop()
			return 0, io.ErrUnexpectedEOF
		case LoseAfter:
			_ = c.Conn.Close()
			c.line.strike()
			return 0, io.ErrUnexpectedEOF
		case Refuse, Conflict:
			c.line.strike()
			continue
		}
		if passed > 0 || err != nil {
			return passed, err
		}
	}
}

func (c *conn) readInvented(p []byte) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(p, c.invented)
	c.invented = c.invented[n:]
	return n
}

// received keeps back the answer to a step with a fault, and returns the fault when the server is
// through with the step.
func (c *conn) received(b []byte) (passed int, due Fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := c.replies.add(b)
	if c.fault == None {
		return len(b), None
	}
	if c.answers -= ended; c.answers > 0 {
		return 0, None
	}
	due, c.fault = c.fault, None
	switch due {
	case Refuse:
		c.invented = refusal("57014", "canceling statement due to statement timeout", c.replies.status, c.expected)
	case Conflict:
		c.invented = refusal("40001", "could not serialize access due to read/write dependencies among transactions", c.replies.status, c.expected)
	}
	return 0, due
}

func (c *conn) Close() error {
	c.line.forget(c)
	return c.Conn.Close()
}

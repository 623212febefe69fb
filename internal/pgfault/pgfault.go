// Package pgfault makes one statement of a process fail on its way to Postgres: the process stops there, its
// connection is lost, or the server rejects the statement.
//
// A [Line] covers the connections of one process to a real server. It reads the protocol above TLS, so it sees every
// statement, in whichever protocol pgx sends it.
package pgfault

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"regexp"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// Fault is the fault that strikes at one step.
type Fault int

// The faults.
const (
	None       Fault = iota
	KillBefore       // the process stops before the step is sent; its connections are closed
	KillAfter        // the process stops after the server has done the step, before the reply arrives
	LoseAfter        // one connection is lost after the server has done the step; the process goes on
	Refuse           // the server rejects the step with a timeout, 57014
	Conflict         // the server rejects the step, a COMMIT, with a conflict, 40001
	Hold             // the process waits before the step with open connections
)

// Step is everything that a process sends before it waits for an answer.
type Step struct {
	SQL     []string // in order
	Outside bool     // no transaction was open, and the step begins none
	Commit  bool     // the step ends with COMMIT
}

// Line covers the connections of one process. While it is armed, it counts their steps. A Line is safe for concurrent
// use.
type Line struct {
	fault    Fault
	at       int
	struck   chan struct{} // closed when the fault has struck
	released chan struct{} // closed by Release

	mu      sync.Mutex
	armed   bool
	steps   []Step
	stopped bool // by a Kill
	conns   map[*conn]struct{}

	strikeOnce, releaseOnce sync.Once
}

// New returns a Line whose fault strikes at a step, from 1.
func New(fault Fault, at int) *Line {
	return &Line{fault: fault, at: at, struck: make(chan struct{}), released: make(chan struct{}), conns: map[*conn]struct{}{}}
}

// Attach puts the connections of a pool with this configuration on the Line.
func (l *Line) Attach(cfg *pgconn.Config) {
	before := cfg.AfterNetConnect
	cfg.AfterNetConnect = func(ctx context.Context, cfg *pgconn.Config, nc net.Conn) (net.Conn, error) {
		if before != nil {
			var err error
			if nc, err = before(ctx, cfg, nc); err != nil {
				return nil, err
			}
		}
		return l.add(nc), nil
	}
}

func (l *Line) add(nc net.Conn) net.Conn {
	l.wait()
	c := &conn{Conn: nc, line: l, requests: requests{prepared: map[string]string{}, portals: map[string]string{}}}
	c.replies.status = idle
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[c] = struct{}{}
	return c
}

func (l *Line) forget(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}

// Arm starts counting steps.
func (l *Line) Arm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = true
}

// Disarm stops counting and returns the steps.
func (l *Line) Disarm() []Step {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
	return l.steps
}

// Backends returns the server's process ids of the connections.
func (l *Line) Backends() (pids []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		pids = append(pids, c.backend())
	}
	return pids
}

// Struck is closed when the fault has struck.
func (l *Line) Struck() <-chan struct{} { return l.struck }

// Release resumes a process stopped by Kill or Hold. After a Kill its old connections are lost.
func (l *Line) Release() { l.releaseOnce.Do(func() { close(l.released) }) }

// step counts a step and returns its fault.
func (l *Line) step(s Step) Fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.armed {
		return None
	}
	l.steps = append(l.steps, s)
	if l.fault == None || len(l.steps) != l.at {
		return None
	}
	return l.fault
}

func (l *Line) strike() { l.strikeOnce.Do(func() { close(l.struck) }) }

// stop cuts the process off: until Release it sends and receives nothing.
func (l *Line) stop() {
	l.mu.Lock()
	l.stopped = true
	for c := range l.conns {
		_ = c.Conn.Close() // so that the server notices
	}
	l.mu.Unlock()
	l.strike()
	l.wait()
}

// wait blocks while the process is stopped.
func (l *Line) wait() {
	l.mu.Lock()
	stopped := l.stopped
	l.mu.Unlock()
	if stopped {
		<-l.released
	}
}

// idle is the state of a connection without a transaction.
const idle = 'I'

var (
	beginning = regexp.MustCompile(`(?i)^\s*(begin|start\s+transaction)\b`)
	ending    = regexp.MustCompile(`(?i)(^|;)\s*commit\s*;?\s*$`)
)

// stepOf returns the step of some statements. A pool's ping is no step.
func stepOf(executed []string, status byte) (s Step, any bool) {
	for _, sql := range executed {
		if sql != "" && !strings.HasPrefix(sql, "-- ping") {
			s.SQL = append(s.SQL, sql)
		}
	}
	if len(s.SQL) == 0 {
		return s, false
	}
	s.Outside = status == idle && !beginning.MatchString(s.SQL[0])
	s.Commit = ending.MatchString(s.SQL[len(s.SQL)-1])
	return s, true
}

// conn is a connection of a Line. Read and Write may be called concurrently.
type conn struct {
	net.Conn
	line     *Line
	requests requests // of Write

	mu       sync.Mutex
	replies  replies
	fault    Fault  // of the step at the server
	answers  int    // that the server has yet to send
	expected int    // that the client waits for
	invented []byte // a rejection that the client has not read yet
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

// instead sends another statement to the server, and the client believes that p was sent.
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

// received withholds the answer to a step with a fault, and returns the fault when the server has finished the step.
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

// headerBytes is the size of a message's type and length.
const headerBytes = 5

// requests parses the messages of a client.
type requests struct {
	started  bool // the first message, which has no type, has passed
	rest     []byte
	prepared map[string]string // SQL by the name of the statement
	portals  map[string]string // SQL by the name of the portal
	executed []string          // since the last message that asks for an answer
}

// add parses some bytes. It returns the statements they execute and the number of ReadyForQuery or similar answers
// that end the reply. It returns 0 if nothing is executed, or a message is incomplete.
func (r *requests) add(b []byte) (executed []string, answers int) {
	r.rest = append(r.rest, b...)
	for {
		head, body, ok := r.next()
		if !ok {
			break
		}
		if r.message(head, body) {
			answers++
		}
	}
	if answers == 0 || len(r.executed) == 0 {
		return nil, 0
	}
	executed, r.executed = r.executed, nil
	return executed, answers
}

// next removes one complete message from the rest.
func (r *requests) next() (head byte, body []byte, ok bool) {
	from := headerBytes
	if !r.started {
		from = headerBytes - 1
	}
	if len(r.rest) < from {
		return 0, nil, false
	}
	end := from + int(binary.BigEndian.Uint32(r.rest[from-4:])) - 4
	if end < from || len(r.rest) < end {
		return 0, nil, false
	}
	if r.started {
		head = r.rest[0]
	}
	body, r.rest, r.started = r.rest[from:end], r.rest[end:], true
	return head, body, true
}

// message records a message, and reports whether the server ends an answer for it.
func (r *requests) message(head byte, body []byte) (answered bool) {
	name, after, _ := bytes.Cut(body, []byte{0})
	text, _, _ := bytes.Cut(after, []byte{0})
	switch head {
	case 'P': // Parse: name, SQL
		r.prepared[string(name)] = string(text)
	case 'B': // Bind: portal, name
		r.portals[string(name)] = r.prepared[string(text)]
	case 'E': // Execute: portal
		r.executed = append(r.executed, r.portals[string(name)])
	case 'Q': // Query: SQL
		r.executed = append(r.executed, string(name))
		return true
	case 'c': // CopyDone
		r.executed = append(r.executed, "the end of COPY")
		return true
	case 'S': // Sync
		return true
	}
	return false
}

// replies parses the messages of the server.
type replies struct {
	head    [headerBytes + 4]byte // the start of the current message
	have    int                   // bytes of head
	left    int                   // bytes of the message that have not arrived
	status  byte                  // of the transaction, at the end of the last answer
	backend uint32                // process id of the server
}

// add parses some bytes and returns how many answers end in them.
func (r *replies) add(b []byte) (ended int) {
	for len(b) > 0 {
		if r.have < headerBytes {
			n := copy(r.head[r.have:headerBytes], b)
			r.have, b = r.have+n, b[n:]
			if r.have == headerBytes {
				r.left = int(binary.BigEndian.Uint32(r.head[1:])) - 4
			}
		} else {
			n := min(r.left, len(b))
			r.have += copy(r.head[r.have:], b[:n])
			r.left, b = r.left-n, b[n:]
		}
		if r.have >= headerBytes && r.left <= 0 {
			ended += r.message()
			r.have = 0
		}
	}
	return ended
}

func (r *replies) message() (ended int) {
	switch r.head[0] {
	case 'Z': // ReadyForQuery
		r.status = r.head[headerBytes]
		return 1
	case 'K': // BackendKeyData
		r.backend = binary.BigEndian.Uint32(r.head[headerBytes:])
	case 'G': // CopyInResponse: the server waits for the rows
		return 1
	}
	return 0
}

// refusal returns the server's rejection of a statement, with as many answers as the client waits for.
func refusal(code, text string, status byte, answers int) []byte {
	said := &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: text}
	var b []byte
	for range answers {
		b = must(said.Encode(b))
		b = must((&pgproto3.ReadyForQuery{TxStatus: status}).Encode(b))
	}
	return b
}

func query(sql string) []byte { return must((&pgproto3.Query{String: sql}).Encode(nil)) }

// must is for messages that cannot be too long.
func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

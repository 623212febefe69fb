// Package pgfault makes one statement of a process's connections to Postgres fail: the process stops
// there, or its connection is lost, or the server refuses the statement.
//
// A [Line] stands for the connections of one process. It reads the protocol above TLS, so it knows the
// statements whichever way pgx sends them, and the server is the real one.
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

// Fault is what becomes of one step.
type Fault int

// The faults.
const (
	None       Fault = iota
	KillBefore       // the process stops before the step is sent; its connections are closed
	KillAfter        // the process stops when the server has done the step and nobody has heard of it
	LoseAfter        // the same happens to one connection; the process goes on
	Refuse           // the server refuses the step as one that takes too long: 57014
	Conflict         // the server refuses the step, a COMMIT, by a conflict: 40001
	Hold             // the process waits before the step, its connections open
)

// Step is what a process sends before it waits for an answer.
type Step struct {
	SQL     []string // in their order
	Outside bool     // no transaction was open, and the step begins none
	Commit  bool     // it ends in COMMIT
}

// Line stands for the connections of one process. Its steps are counted while it is armed. A Line is
// safe for concurrent use.
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

// Attach has the connections that a pool makes with this configuration belong to the Line.
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

// Arm begins to count steps.
func (l *Line) Arm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = true
}

// Disarm ends it and returns the steps.
func (l *Line) Disarm() []Step {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
	return l.steps
}

// Backends are the processes of the server that work for the connections.
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

// Release lets the process go on that a Kill or Hold has stopped. After a Kill the connections that it
// had are lost.
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

// stop is the Kill: nothing more comes from the process, or reaches it, until Release.
func (l *Line) stop() {
	l.mu.Lock()
	l.stopped = true
	for c := range l.conns {
		_ = c.Conn.Close() // the server finds out
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

// stepOf says what is executed, or that it is nothing but a pool's question whether somebody is there.
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

// headerBytes are the type of a message and its length.
const headerBytes = 5

// requests reads what a client sends.
type requests struct {
	started  bool // the first message, which has no type, is over
	rest     []byte
	prepared map[string]string // SQL by the name of the statement
	portals  map[string]string // SQL by the name of the portal
	executed []string          // since the server was last asked for an answer
}

// add reads some bytes. It returns what is executed by them and how many answers end what the server
// sends back: 0 if nothing is executed, or the rest of it is still to come.
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

// next takes a whole message off the rest.
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

// message notes one, and reports whether the server answers it by the end of an answer.
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

// replies reads what the server sends.
type replies struct {
	head    [headerBytes + 4]byte // the beginning of the message at hand
	have    int                   // bytes of head
	left    int                   // bytes of the message that are still to come
	status  byte                  // of the transaction, at the end of the last answer
	backend uint32                // the process of the server
}

// add reads some bytes and returns how many answers have ended in them.
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

// refusal is what a server says that refuses a statement, as often as the client waits for an answer.
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

// must is for messages that are never too long.
func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

package pgfault

import (
	"context"
	"net"
	"regexp"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
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

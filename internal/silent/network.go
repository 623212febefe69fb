// Package silent runs clients of Postgres, Redis and RabbitMQ in a bubble of testing/synctest and makes their connections
// fall silent. The connections are net.Pipes, so that time is virtual and a test can assert exact durations.
//
// Postgres and Redis answer from a script, or forward each request to a real server. While a request is at a real server
// the clock of the bubble stands still. RabbitMQ always answers from a script. Only tests import the package.
//
// timing: all of it runs in a bubble.
package silent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Today runs a test in a bubble whose clock starts at the present time, like the clock of a real server. That clock
// stands still while the bubble's clock moves.
func Today(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	now := time.Now().Round(0)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(now))
		test(t)
	})
}

// network holds the connections of a server and the faults on the way to it. Its methods are safe for concurrent use.
type network struct {
	mu       sync.Mutex
	conns    map[*conn]bool
	silence  testenv.Silence // the next one
	silenced int
	dialed   int
	paused   chan struct{} // closed by Heal; nil: nothing is paused
	closed   bool
}

// init ends all connections when the test ends.
func (n *network) init(t testing.TB) {
	n.conns = map[*conn]bool{}
	t.Cleanup(func() {
		n.Heal()
		n.mu.Lock()
		n.closed = true
		for c := range n.conns {
			_ = c.Close()
		}
		n.mu.Unlock()
		time.Sleep(time.Minute) // goroutines that clients have abandoned end, or the bubble would panic
	})
}

// SilenceOn makes the next connections that s describes fall silent. It replaces the silence of an earlier call.
func (n *network) SilenceOn(s testenv.Silence) {
	s.Connections = max(s.Connections, 1)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.silence = s
}

// SilenceConnections makes every open connection fall silent. New connections work.
func (n *network) SilenceConnections() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		n.mute(c, false)
		if c.server != nil {
			_ = c.server.Close()
		}
	}
}

// Pause holds everything that clients send and the server answers, until Heal. New connections open.
func (n *network) Pause() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.paused == nil {
		n.paused = make(chan struct{})
	}
}

// Heal ends every fault, delivers held requests and closes the silent connections.
func (n *network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.silence = testenv.Silence{}
	if n.paused != nil {
		close(n.paused)
		n.paused = nil
	}
	for c := range n.conns {
		if c.lossy {
			_ = c.Close()
		}
	}
}

// Silenced returns how many connections have fallen silent.
func (n *network) Silenced() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.silenced
}

// Dialed returns how many connections clients have opened.
func (n *network) Dialed() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dialed
}

// Kept returns how many silent connections the clients keep open.
func (n *network) Kept() (kept int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		if c.lossy {
			kept++
		}
	}
	return kept
}

func (n *network) mute(c *conn, oneWay bool) {
	if !c.lossy {
		n.silenced++
	}
	c.lossy, c.silent = true, c.silent || !oneWay
}

// dial opens a connection, which serve reads and answers. serve ends with its connection.
func (n *network) dial(serve func(*conn) error) (net.Conn, error) {
	client, server := net.Pipe()
	c := &conn{Conn: server, network: n, chunks: make(chan []byte, 1024), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, errors.New("silent: the test has ended")
	}
	n.dialed++
	n.conns[c] = true
	go c.receive()
	go func() {
		_ = serve(c) // the client sees a closed connection
		close(c.done)
		_ = c.Close()
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.conns, c)
		if c.server != nil {
			_ = c.server.Close()
		}
	}()
	return client, nil
}

// conn is the server's end of a connection.
type conn struct {
	net.Conn
	network *network
	chunks  chan []byte
	rest    []byte
	done    chan struct{} // closed when the connection has ended

	// network.mu guards these. A lossy connection answers nothing; a silent one receives nothing either.
	lossy, silent bool
	server        net.Conn // the connection to a real server, if there is one
}

// forgotten closes the connection to a real server once this one is silent, so that the server rolls back. Otherwise others
// could wait for its locks while the clock stands still.
func (c *conn) forgotten() {
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	if c.silent && c.server != nil {
		_ = c.server.Close()
	}
}

// receive reads from the client as a kernel does: up to a limit, even if the server does not read.
func (c *conn) receive() {
	defer close(c.chunks)
	for {
		chunk := make([]byte, 64<<10)
		n, err := c.Conn.Read(chunk)
		if err != nil {
			return
		}
		c.chunks <- chunk[:n]
	}
}

// Read implements io.Reader.
func (c *conn) Read(p []byte) (int, error) {
	c.network.wait()
	if len(c.rest) == 0 {
		chunk, ok := <-c.chunks
		if !ok {
			return 0, io.EOF
		}
		c.network.wait()
		c.rest = chunk
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Close also unblocks receive.
func (c *conn) Close() error {
	err := c.Conn.Close()
	go func() {
		for range c.chunks { // receive ends
		}
	}()
	return err
}

// wait returns when nothing is paused.
func (n *network) wait() {
	n.mu.Lock()
	paused := n.paused
	n.mu.Unlock()
	if paused != nil {
		<-paused
	}
}

// arrives reports whether a request reaches the server.
func (c *conn) arrives(request []byte) bool {
	c.network.wait()
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	if !c.lossy && c.network.falls(c, request, false) {
		return c.network.silence.Deliver
	}
	return !c.silent
}

// answer sends data to the client, unless the connection is silent.
func (c *conn) answer(data []byte) error {
	c.network.wait()
	c.network.mu.Lock()
	lost := c.lossy
	if !lost && c.network.falls(c, data, true) {
		lost = !c.network.silence.Deliver
	}
	c.network.mu.Unlock()
	if lost || len(data) == 0 {
		return nil
	}
	_, err := c.Conn.Write(data)
	return err
}

// falls reports whether the connection falls silent because of data. The caller holds n.mu.
func (n *network) falls(c *conn, data []byte, answer bool) bool {
	s := &n.silence
	if s.Connections == 0 || s.Answer != answer || len(data) == 0 || !bytes.Contains(data, []byte(s.On)) {
		return false
	}
	s.Connections--
	n.mute(c, s.OneWay)
	return true
}

// upstream opens a connection to a real server, which ends with this one.
func (c *conn) upstream(addr string) (net.Conn, error) {
	server, err := new(net.Dialer).DialContext(context.Background(), "tcp", addr)
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	c.server = server
	return server, err
}

// Took fails the test unless the time since start is want.
func Took(t testing.TB, step string, start time.Time, want time.Duration) {
	t.Helper()
	if took := time.Since(start); took != want {
		t.Errorf("%s took %v, want %v", step, took, want)
	}
}

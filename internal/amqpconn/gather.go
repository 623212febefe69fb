package amqpconn

import (
	"net"
	"sync"
	"time"
)

const (
	// maxGathered is how many bytes may wait for the socket before Write waits too.
	maxGathered = 256 << 10
	// flushPatience is how long Close waits for them.
	flushPatience = time.Second
)

// gatherer is a connection whose writes are done by a goroutine of its own. What
// arrives while one system call is under way leaves together with the next one. The
// client makes one call per message, which is most of what a message costs it.
type gatherer struct {
	net.Conn
	ended chan struct{} // the goroutine has returned

	mu      sync.Mutex
	changed sync.Cond
	buf     []byte
	err     error // why nothing more can be written
}

// GatherWrites wraps a new connection. A write then returns before it is done, and
// reports the failure of an earlier one. Close ends the goroutine.
func GatherWrites(conn net.Conn) net.Conn {
	g := &gatherer{Conn: conn, ended: make(chan struct{})}
	g.changed.L = &g.mu
	go g.run()
	return g
}

// Write takes the bytes over. It waits while too many wait for the socket.
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

// next waits for bytes and returns them; the buffer of those sent before is used
// again. It is false when all is written and the connection is closed.
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

// fail keeps the first error and wakes everybody.
func (g *gatherer) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = err
	}
	g.changed.Broadcast()
}

// Close writes what waits, for a second at most, and closes the connection.
func (g *gatherer) Close() error {
	g.fail(net.ErrClosed)
	_ = g.Conn.SetWriteDeadline(time.Now().Add(flushPatience)) // a closed one needs none
	<-g.ended
	return g.Conn.Close()
}

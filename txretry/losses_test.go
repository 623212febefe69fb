package txretry_test

import (
	"bytes"
	"context"
	"io"
	"net"

	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// losses is a network that loses the answer to COMMIT, or COMMIT itself, in the attempts that a
// script of the fake names. One transaction runs at a time.
type losses struct {
	script   []txretrytest.Fault
	attempts int
}

func (l *losses) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	return &lossyConn{conn, l}, err
}

type lossyConn struct {
	net.Conn
	l *losses
}

func (c *lossyConn) Write(p []byte) (int, error) {
	switch {
	case bytes.Contains(p, []byte("begin isolation")):
		c.l.attempts++
	case bytes.HasSuffix(p, []byte("\x0bcommit\x00")) && c.l.attempts <= len(c.l.script):
		return c.commit(p, c.l.script[c.l.attempts-1].Point)
	}
	return c.Conn.Write(p)
}

func (c *lossyConn) commit(p []byte, fault txretrytest.Point) (n int, err error) {
	switch fault {
	case txretrytest.ReplyLostNotApplied:
		_ = c.Conn.Close()
		return 0, io.ErrClosedPipe
	case txretrytest.ReplyLostApplied:
		if n, err = c.Conn.Write(p); err == nil {
			_, err = c.Conn.Read(make([]byte, 1<<16)) // what would have told
		}
		_ = c.Conn.Close()
		return n, err
	}
	return c.Conn.Write(p)
}

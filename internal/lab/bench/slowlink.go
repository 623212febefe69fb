package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// slowLink is a TCP relay that delivers every byte a fixed time after it came,
// in order. It adds latency only: what is under way does not hold up what
// comes behind it.
type slowLink struct {
	target   string
	delay    time.Duration // per direction
	listener net.Listener
	cancel   context.CancelFunc
	wg       sync.WaitGroup
}

// newSlowLink starts a relay to target. It must be closed.
func newSlowLink(target string, delay time.Duration) *slowLink {
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	ctx, cancel := context.WithCancel(context.Background())
	l := &slowLink{target: target, delay: delay, listener: listener, cancel: cancel}
	l.wg.Go(func() { l.accept(ctx) })
	return l
}

func (l *slowLink) addr() *net.TCPAddr { return l.listener.Addr().(*net.TCPAddr) }

// Close cuts all connections and returns when nothing of the relay is left.
func (l *slowLink) Close() error {
	err := l.listener.Close()
	l.cancel()
	l.wg.Wait()
	return err
}

func (l *slowLink) accept(ctx context.Context) {
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return // closed
		}
		l.wg.Go(func() { l.serve(ctx, client.(*net.TCPConn)) })
	}
}

func (l *slowLink) serve(ctx context.Context, client *net.TCPConn) {
	defer client.Close()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.target)
	if err != nil {
		return
	}
	server := conn.(*net.TCPConn)
	defer server.Close()
	cut := context.AfterFunc(ctx, func() { _ = errors.Join(client.Close(), server.Close()) })
	defer cut()

	var both sync.WaitGroup
	both.Go(func() { l.carry(ctx, server, client) })
	both.Go(func() { l.carry(ctx, client, server) })
	both.Wait()
}

// parcel is what arrived in one piece, and when it is to be delivered.
type parcel struct {
	due   time.Time
	bytes []byte
}

// carry moves one direction until its source ends.
func (l *slowLink) carry(ctx context.Context, to, from *net.TCPConn) {
	underWay := make(chan parcel, 1024)
	l.wg.Go(func() {
		defer close(underWay)
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			underWay <- parcel{time.Now().Add(l.delay), bytes.Clone(buf[:n])}
		}
	})
	for p := range underWay {
		err := runloop.Sleep(ctx, time.Until(p.due))
		if err == nil {
			_, err = to.Write(p.bytes)
		}
		if err != nil { // the other side is gone: stop reading, and let the reader end
			_ = from.Close()
			for range underWay {
			}
			return
		}
	}
	_ = to.CloseWrite()
}

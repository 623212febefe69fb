package testenv

import (
	"context"
	"net"
	"sync"
	"time"
)

// link is one client's connection and its other half.
type link struct {
	client, server net.Conn
	lossy          bool // it loses what the server sends: its stream makes no sense any more
	silent         bool // it loses everything, the end of either side included
	closed         bool
}

func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // timing: a client meanwhile waits as long as it wants
	server, err := (&net.Dialer{}).DialContext(ctx, "tcp", target)
	cancel()
	if err != nil {
		_ = client.Close()
		return
	}
	l := &link{client: client, server: server}
	p.mu.Lock()
	p.links[l] = true
	if p.mode == cut {
		p.close(l, true)
	}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.pump(l, server, client, false) })
	both.Go(func() { p.pump(l, client, server, true) })
	both.Wait()

	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// pump moves bytes one way until either side ends.
func (p *Proxy) pump(l *link, to, from net.Conn, replies bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			p.wait()
		}
		if n > 0 && p.pass(l, buf[:n], replies) {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if err != nil {
			p.end(l, from)
			return
		}
	}
}

// wait keeps what was read for the time of Delay.
func (p *Proxy) wait() {
	p.mu.Lock()
	delay := p.delay
	p.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay) // timing: the delay that a test asked for
	}
}

// end tells the other side that one side has ended, unless the link is silent.
func (p *Proxy) end(l *link, side net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.silent && !l.closed {
		_ = side.Close() // the other half stays open until the link is reset
		return
	}
	p.close(l, false)
	p.changed.Broadcast()
}

// pass waits while data is held and reports whether to forward it.
func (p *Proxy) pass(l *link, data []byte, replies bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.mode == holding && !l.closed && !l.silent {
		p.changed.Wait()
	}
	if l.closed || l.silent {
		return false
	}
	if p.mode == droppingReplies && replies {
		l.lossy = true
	}
	if p.silences(l, data, replies) {
		return p.silence.Deliver
	}
	return !l.lossy || !replies
}

// close ends a link, so that both peers see a reset or an ordinary end; p.mu is held.
func (p *Proxy) close(l *link, reset bool) {
	if l.closed {
		return
	}
	l.closed = true
	for _, conn := range []net.Conn{l.client, l.server} {
		if tcp, ok := conn.(*net.TCPConn); ok && reset {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
	}
}

package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP relay between a client and a server that can fail as a
// network does. It starts out forwarding. Its methods may be called from any goroutine.
type Proxy struct {
	t      testing.TB
	rawURL *url.URL
	target string
	addr   string

	mu       sync.Mutex
	changed  *sync.Cond // of mode, or of a link's closed
	mode     proxyMode
	listener net.Listener // nil while cut
	links    map[*link]bool
	silence  Silence // still to come
	silenced int
	wg       sync.WaitGroup
}

type proxyMode int

const (
	forwarding proxyMode = iota
	holding
	droppingReplies
	cut
)

// link is one client's connection and its other half.
type link struct {
	client, server net.Conn
	lossy          bool // it loses what the server sends: its stream makes no sense any more
	silent         bool // it loses everything, the end of either side included
	closed         bool
}

// NewProxy starts a relay to the host of a server's URL. It ends with the test.
func NewProxy(t testing.TB, rawURL string) *Proxy {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{t: t, rawURL: u, target: hostPort(u), addr: fmt.Sprintf("127.0.0.1:%d", port), mode: cut, links: map[*link]bool{}}
	p.changed = sync.NewCond(&p.mu)
	p.Heal()
	t.Cleanup(func() {
		p.Cut()
		p.wg.Wait()
	})
	return p
}

func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	usual := map[string]string{"postgres": "5432", "postgresql": "5432", "redis": "6379", "amqp": "5672"}
	return net.JoinHostPort(u.Hostname(), usual[u.Scheme])
}

// Addr returns the relay's own host and port.
func (p *Proxy) Addr() string { return p.addr }

// URL returns the server's URL with the relay's address in it.
func (p *Proxy) URL() string { return p.Rewrite(p.rawURL.String()) }

// Rewrite returns any URL of the same server with the relay's address in it.
func (p *Proxy) Rewrite(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil {
		p.t.Errorf("testenv: proxy: %v", err)
		return ""
	}
	u.Host = p.addr
	return u.String()
}

// Cut resets every connection and refuses new ones, until Heal.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode, p.silence = cut, Silence{}
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	for l := range p.links {
		p.close(l, true)
	}
	p.changed.Broadcast()
}

// CutConnections resets every connection of now; new ones are served.
func (p *Proxy) CutConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		p.close(l, true)
	}
	p.changed.Broadcast()
}

// Pause holds all bytes of both directions, until Resume. Connections stay open and
// new ones are accepted: the other side is silent, not gone.
func (p *Proxy) Pause() { p.set(holding) }

// Resume forwards what was held, and everything after it.
func (p *Proxy) Resume() { p.Heal() }

// DropReplies forwards what clients send and throws away what the server answers, until
// Heal or Cut: a COMMIT takes effect and its reply is lost.
func (p *Proxy) DropReplies() { p.set(droppingReplies) }

func (p *Proxy) set(mode proxyMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == cut {
		p.t.Errorf("testenv: proxy: cut, Heal it first")
		return
	}
	p.mode = mode
	p.changed.Broadcast()
}

// Heal ends every fault. Connections that lost bytes are reset, for their streams have a hole.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener == nil {
		listener, err := net.Listen("tcp", p.addr)
		if err != nil {
			p.t.Errorf("testenv: proxy: %v", err)
			return
		}
		p.listener = listener
		p.wg.Go(func() { p.accept(listener) })
	}
	for l := range p.links {
		if l.lossy {
			p.close(l, true)
		}
	}
	p.mode, p.silence = forwarding, Silence{}
	p.changed.Broadcast()
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			p.t.Errorf("testenv: proxy: %v", err)
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	server, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.target)
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

package testenv

import (
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
	report func(error)
	rawURL *url.URL
	addr   string

	mu       sync.Mutex
	target   string
	delay    time.Duration
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

// NewProxy starts a relay to the host of a server's URL. It ends with the test.
func NewProxy(t testing.TB, rawURL string) *Proxy {
	t.Helper()
	p, err := OpenProxy(rawURL, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// OpenProxy is NewProxy where there is no test: the relay ends with Close, and report learns what goes
// wrong in it that is no fault of its making. It may be called from any goroutine.
func OpenProxy(rawURL string, report func(error)) (*Proxy, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	p := &Proxy{report: report, rawURL: u, target: hostPort(u), addr: fmt.Sprintf("127.0.0.1:%d", port), mode: cut, links: map[*link]bool{}}
	p.changed = sync.NewCond(&p.mu)
	p.Heal()
	return p, nil
}

// Close resets every connection and returns when nothing of the relay is left.
func (p *Proxy) Close() {
	p.Cut()
	p.wg.Wait()
}

// Retarget has new connections go to the host of another URL, as an address that moves to another
// server does. Those of now stay: CutConnections ends them.
func (p *Proxy) Retarget(rawURL string) error {
	u, err := url.Parse(rawURL)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = hostPort(u)
	return nil
}

// Delay has every read of either side forwarded so much later; 0 ends that. What comes behind waits, too.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
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
		p.report(fmt.Errorf("testenv: proxy: %w", err))
		return ""
	}
	u.Host = p.addr
	return u.String()
}

// Cut resets every connection and refuses new ones, until Heal.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode, p.silence, p.delay = cut, Silence{}, 0
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
		p.report(errors.New("testenv: proxy: cut, Heal it first"))
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
			p.report(fmt.Errorf("testenv: proxy: %w", err))
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
	p.mode, p.silence, p.delay = forwarding, Silence{}, 0
	p.changed.Broadcast()
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			p.report(fmt.Errorf("testenv: proxy: %w", err))
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

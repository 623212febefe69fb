package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP relay between a client and a server that can fail like a network. It starts in
// forwarding mode. Its methods may be called from any goroutine.
type Proxy struct {
	report func(error)
	rawURL *url.URL
	addr   string

	mu       sync.Mutex
	target   string
	delay    time.Duration
	changed  *sync.Cond // signals changes of mode and of a link's closed
	mode     proxyMode
	listener net.Listener // nil while cut
	links    map[*link]bool
	silence  Silence // the next silence to trigger
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

// NewProxy starts a relay to the host in a server's URL. It closes when the test ends.
func NewProxy(t testing.TB, rawURL string) *Proxy {
	t.Helper()
	p, err := OpenProxy(rawURL, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// OpenProxy is NewProxy without a test. The caller must Close the relay. report gets unexpected errors of
// the relay, not the faults that it injects. report may be called from any goroutine.
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

// Retarget sends new connections to the host of another URL, like an address that moves to another
// server. Current connections stay: CutConnections ends them.
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

// Delay delays the forwarding of every read by d, in both directions; 0 ends that. Later bytes wait, too.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	usual := map[string]string{"postgres": "5432", "postgresql": "5432", "redis": "6379", "amqp": "5672", "nats": "4222"}
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

// CutConnections resets all current connections. New ones are served.
func (p *Proxy) CutConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		p.close(l, true)
	}
	p.changed.Broadcast()
}

// Pause holds the bytes of both directions, until Resume. Connections stay open and new ones are
// accepted: the other side is silent, not gone.
func (p *Proxy) Pause() { p.set(holding) }

// Resume forwards the held bytes, and everything after them.
func (p *Proxy) Resume() { p.Heal() }

// DropReplies forwards the bytes of clients and drops the bytes of the server, until Heal or Cut: a
// COMMIT takes effect and its reply is lost.
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

// Heal ends every fault. Connections that lost bytes are reset, because their streams have a gap.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener == nil {
		listener, err := listenAgain(p.addr)
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

// listenAgain listens on an address of which this process has just closed a listener. A process that was started
// meanwhile has a copy of that listener until its program runs, and the address is in use as long.
func listenAgain(addr string) (net.Listener, error) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) { // timing: the start of a process
		l, err := net.Listen("tcp", addr)
		if err == nil || !portTaken(err) || time.Now().After(deadline) {
			return l, err
		}
	}
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

// link is one client's connection and its connection to the server.
type link struct {
	client, server net.Conn
	lossy          bool // the server's bytes are lost, so the stream is broken
	silent         bool // all bytes are lost, and the end of either side
	closed         bool
}

func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // timing: the client's own timeout limits its wait
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

// pump copies bytes in one direction until either side ends.
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

// wait sleeps for the time of Delay.
func (p *Proxy) wait() {
	p.mu.Lock()
	delay := p.delay
	p.mu.Unlock()
	if delay > 0 {
		time.Sleep(delay) // timing: the delay that a test requested
	}
}

// end closes the other side after one side has ended, unless the link is silent.
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

// pass waits while data is held, and reports whether to forward it.
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

// close ends a link with a reset or normally; the caller holds p.mu.
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

// Silence selects the connections of a Proxy that fall silent. A silent connection stays open on both
// sides but carries nothing any more, as behind a router that dropped its state. The server is not
// notified when its client closes: a transaction stays open there until Heal or Cut.
type Silence struct {
	// On is the trigger: a text within one read from a client, such as "commit". "" matches any bytes.
	On string

	// Answer searches for On in the bytes of the server instead.
	Answer bool

	// Deliver forwards the bytes that contain On, and nothing after them: the request takes effect and
	// its answer is lost.
	Deliver bool

	// OneWay drops only the bytes of the server. The client's requests still arrive.
	OneWay bool

	// Connections is how many connections fall silent, each when it sends On; 0 means one.
	Connections int
}

// SilenceOn silences the next connections that match s. It replaces a pending SilenceOn. Heal and Cut end
// it.
func (p *Proxy) SilenceOn(s Silence) {
	s.Connections = max(s.Connections, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silence = s
}

// SilenceConnections makes all current connections half-open: both sides see an open connection, but
// nothing arrives any more, not even a close. New connections are served. Heal, Cut and CutConnections
// reset the silent ones.
func (p *Proxy) SilenceConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		p.mute(l, false)
	}
	p.changed.Broadcast()
}

// Silenced returns how many connections have fallen silent since the proxy started.
func (p *Proxy) Silenced() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silenced
}

// mute silences one connection, or only its server side; the caller holds p.mu.
func (p *Proxy) mute(l *link, oneWay bool) {
	if !l.lossy {
		p.silenced++
	}
	l.lossy, l.silent = true, l.silent || !oneWay
}

// silences reports whether data triggers the silence of its connection; the caller holds p.mu.
func (p *Proxy) silences(l *link, data []byte, replies bool) bool {
	s := &p.silence
	if s.Connections == 0 || l.lossy || s.Answer != replies || !bytes.Contains(data, []byte(s.On)) {
		return false
	}
	s.Connections--
	p.mute(l, s.OneWay)
	return true
}

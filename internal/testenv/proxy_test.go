package testenv_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// echo is a server that sends every line back. It also sends each line it reads on a channel.
func echo(t *testing.T) (rawURL string, lines <-chan string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	seen := make(chan string, 100)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for in := bufio.NewScanner(conn); in.Scan(); {
					seen <- in.Text()
					if _, err := io.WriteString(conn, in.Text()+"\n"); err != nil {
						return
					}
				}
			}()
		}
	}()
	return "tcp://user:pw@" + listener.Addr().String() + "/path?x=1", seen
}

// A process that starts holds a copy of the listener for a moment. A proxy listens again all the same.
func TestProxy_besideNewProcesses(t *testing.T) {
	t.Parallel()
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
				_ = exec.Command(os.Args[0], "-test.list=^$").Run()
			}
		}
	}()
	p := testenv.NewProxy(t, "tcp://127.0.0.1:1")
	for range 2000 {
		p.Cut()
		p.Heal()
	}
	close(done)
	<-ended
}

type client struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func dial(t *testing.T, p *testenv.Proxy) *client {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &client{t, conn, bufio.NewReader(conn)}
}

func (c *client) send(line string) {
	c.t.Helper()
	_, err := io.WriteString(c.conn, line+"\n")
	must(c.t, err)
}

func (c *client) want(line string) {
	c.t.Helper()
	must(c.t, c.conn.SetReadDeadline(time.Now().Add(testenv.Patience)))
	if got, err := c.in.ReadString('\n'); err != nil || got != line+"\n" {
		c.t.Fatalf("received %q, %v; want %q", got, err, line)
	}
}

func (c *client) wantSilence() {
	c.t.Helper()
	must(c.t, c.conn.SetReadDeadline(time.Now().Add(50*time.Millisecond))) // timing: it must pass
	if got, err := c.in.ReadString('\n'); !errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("received %q, %v; want silence", got, err)
	}
}

func (c *client) wantReset() {
	c.t.Helper()
	must(c.t, c.conn.SetReadDeadline(time.Now().Add(testenv.Patience)))
	if got, err := c.in.ReadString('\n'); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("received %q, %v; want a reset", got, err)
	}
}

func TestProxyCut(t *testing.T) {
	t.Parallel()
	rawURL, _ := echo(t)
	p := testenv.NewProxy(t, rawURL)
	if want := "tcp://user:pw@" + p.Addr() + "/path?x=1"; p.URL() != want {
		t.Errorf("URL() = %s, want %s", p.URL(), want)
	}
	c := dial(t, p)
	c.send("a")
	c.want("a")

	p.Cut()
	c.wantReset()
	if conn, err := net.Dial("tcp", p.Addr()); err == nil {
		_ = conn.Close()
		t.Fatal("a cut proxy accepts")
	}
	p.Heal()
	c = dial(t, p)
	c.send("b")
	c.want("b")

	p.CutConnections()
	c.wantReset()
	c = dial(t, p)
	c.send("c")
	c.want("c")
}

func TestProxyPause(t *testing.T) {
	t.Parallel()
	rawURL, seen := echo(t)
	p := testenv.NewProxy(t, rawURL)
	c := dial(t, p)
	p.Pause()
	c.send("a")
	late := dial(t, p)
	late.send("b")
	c.wantSilence()
	if len(seen) != 0 {
		t.Fatal("the server saw held bytes")
	}
	p.Resume()
	c.want("a")
	late.want("b")

	p.Pause()
	c.send("c")
	p.Cut() // does not wait for a Resume
	c.wantReset()
}

func TestProxyDropReplies(t *testing.T) {
	t.Parallel()
	rawURL, seen := echo(t)
	p := testenv.NewProxy(t, rawURL)
	c := dial(t, p)
	c.send("a")
	c.want("a")
	<-seen

	p.DropReplies()
	c.send("commit")
	if line := <-seen; line != "commit" {
		t.Fatalf("the server saw %q", line)
	}
	c.wantSilence()
	p.Heal()
	c.wantReset()
	c = dial(t, p)
	c.send("b")
	c.want("b")
}

func TestProxySilenceConnections(t *testing.T) {
	t.Parallel()
	rawURL, seen := echo(t)
	p := testenv.NewProxy(t, rawURL)
	c, closing := dial(t, p), dial(t, p)
	c.send("a")
	c.want("a")
	closing.send("b")
	closing.want("b")
	<-seen
	<-seen

	p.SilenceConnections()
	must(t, closing.conn.Close())
	c.send("lost")
	c.wantSilence()
	late := dial(t, p)
	late.send("c")
	late.want("c")
	if line := <-seen; line != "c" {
		t.Fatalf("the server saw %q of a silent connection", line)
	}
	p.CutConnections()
	c.wantReset()
	late.wantReset()
}

func TestProxySilenceOn(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		silence testenv.Silence
		arrives []string // at the server, sorted
		hears   bool     // the answer to commit
	}{
		"request lost":      {testenv.Silence{On: "commit"}, []string{"other"}, false},
		"reply lost":        {testenv.Silence{On: "commit", Deliver: true}, []string{"commit", "other"}, false},
		"replies lost":      {testenv.Silence{On: "commit", Deliver: true, OneWay: true}, []string{"again", "commit", "other"}, false},
		"after the answer":  {testenv.Silence{On: "commit", Answer: true, Deliver: true}, []string{"commit", "other"}, true},
		"before the answer": {testenv.Silence{On: "commit", Answer: true}, []string{"commit", "other"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rawURL, seen := echo(t)
			p := testenv.NewProxy(t, rawURL)
			p.SilenceOn(test.silence)
			c, other := dial(t, p), dial(t, p)
			c.send("begin")
			c.want("begin")
			<-seen
			c.send("commit")
			if test.hears {
				c.want("commit")
			}
			c.wantSilence()
			c.send("again")
			c.wantSilence()
			other.send("other")
			other.want("other")
			var arrived []string
			for range len(test.arrives) {
				arrived = append(arrived, <-seen)
			}
			slices.Sort(arrived)
			if !slices.Equal(arrived, test.arrives) {
				t.Errorf("the server saw %q, want %q", arrived, test.arrives)
			}
		})
	}
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// pipes is a listener whose connections live in memory, where time can be faked.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	close  func()
}

func listenOnPipes() *pipes {
	closed := make(chan struct{})
	return &pipes{make(chan net.Conn, 1), closed, sync.OnceFunc(func() { close(closed) })}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.close()
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// TestClientsThatDoNotReadOrWrite wants each of them to lose its connection after some minutes.
func TestClientsThatDoNotReadOrWrite(t *testing.T) {
	t.Parallel()
	for name, sends := range map[string]string{
		"reads nothing":      "GET / HTTP/1.1\r\nHost: shop\r\n\r\n",
		"sends half a head":  "GET / HTTP/1.1\r\nHo",
		"sends half a body":  "POST / HTTP/1.1\r\nHost: shop\r\nContent-Length: 10\r\n\r\n12345",
		"sends nothing else": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if _, err := io.ReadAll(r.Body); err == nil {
						_, _ = w.Write(make([]byte, 1<<20))
					}
				})
				client, conn := net.Pipe()
				listener := listenOnPipes()
				listener.conns <- conn
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- serveHTTP(ctx, listener, newServer(handler)) }()
				if _, err := fmt.Fprint(client, sends); err != nil {
					t.Fatal(err)
				}
				time.Sleep(4 * time.Minute)
				synctest.Wait()
				// A pipe has a deadline for as long as its other end is open.
				if err := client.SetDeadline(time.Time{}); !errors.Is(err, io.ErrClosedPipe) {
					t.Errorf("after four minutes the connection is still open: %v", err)
				}
				_ = client.Close()
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// stuck is a service that ignores its context until a test ends.
type stuck struct{ end chan struct{} }

func (s stuck) Run(context.Context) error   { <-s.end; return nil }
func (s stuck) Ready(context.Context) error { return nil }

// A signal ends a process whose servers are silent: requests have drainTimeout, then the services have stopTimeout.
func TestRunAll_endsWithStuckServices(t *testing.T) {
	t.Parallel()
	for name, requests := range map[string]int{"a request in flight": 1, "no request": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				listener := listenOnPipes()
				client, conn := net.Pipe()
				listener.conns <- conn
				server := newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }))
				ctx, signal := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() {
					ended <- runAll(ctx, []service{{roleRelay, stuck{end}}}, func(ctx context.Context) error { return serveHTTP(ctx, listener, server) })
				}()
				if requests > 0 {
					if _, err := fmt.Fprint(client, "GET / HTTP/1.1\r\nHost: shop\r\n\r\n"); err != nil {
						t.Fatal(err)
					}
				} else {
					_ = client.Close()
				}
				synctest.Wait()
				began := time.Now()
				signal()
				err := <-ended
				if took, want := time.Since(began), time.Duration(requests)*drainTimeout+stopTimeout; err == nil || took != want {
					t.Errorf("ended after %v with %v, want %v and the name of the service", took, err, want)
				}
				close(end)
				_ = client.Close()
			})
		})
	}
}

// TestBacklogTellsWhatItKnows wants no number before a server has told it, nor long after.
func TestBacklogTellsWhatItKnows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var noOutbox, noQueue error
		b := &backlog{
			outbox: func(context.Context) (driver.Depth, error) {
				return driver.Depth{Ready: 1, Parked: 2, Dead: 3}, noOutbox
			},
			queue: func(context.Context) (inbox.Stats, error) {
				return inbox.Stats{Waiting: 4, Retrying: 5, Dead: map[string]int{"validation": 6}}, noQueue
			},
			inHand: func() int64 { return 7 },
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Run(ctx) }()
		// wants looks for as long as somebody would, and wants the last look to be so.
		wants := func(when string, seconds int, want flow.Backlog) {
			t.Helper()
			var got flow.Backlog
			for range seconds {
				_, _ = b.Look(ctx) // it does not fail
				time.Sleep(time.Second)
				synctest.Wait()
				got, _ = b.Look(ctx)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v", when, got)
			}
		}
		outage := errors.New("no answer")
		all := flow.Backlog{Outbox: new(3), Queue: new(16), Dead: new(9)}

		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("at first: %+v, %v", got, err)
		}
		wants("both answer", 1, all)
		noOutbox = outage
		wants("the outbox is away for a moment", 2, all)
		wants("the outbox is away", 5, flow.Backlog{Queue: new(16)})
		noOutbox, noQueue = nil, outage
		wants("the queue is away", 7, flow.Backlog{Outbox: new(3)})
		noQueue = nil
		wants("both are back", 1, all)
		time.Sleep(time.Minute)
		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("nobody has looked for a minute: %+v, %v", got, err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

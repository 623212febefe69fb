package main

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// echo returns the address of a server that sends back what it gets.
func echo(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return listener.Addr().String()
}

func dialSlow(t *testing.T, delay time.Duration) *net.TCPConn {
	t.Helper()
	link, err := newSlowLink(echo(t), delay)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := link.Close(); err != nil {
			t.Error(err)
		}
	})
	conn, err := net.DialTCP("tcp", nil, link.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestSlowLinkDelaysBothDirections(t *testing.T) {
	t.Parallel()
	const delay = 30 * time.Millisecond
	conn := dialSlow(t, delay)
	for range 3 {
		start := time.Now()
		if _, err := conn.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		if trip := time.Since(start); trip < 2*delay {
			t.Errorf("a trip took %v, want at least %v", trip, 2*delay)
		}
	}
}

// A link that waited before it read on would take 200 delays one after the other.
func TestSlowLinkKeepsOrderAndBandwidth(t *testing.T) {
	t.Parallel()
	const delay = 100 * time.Millisecond
	conn := dialSlow(t, delay)
	sent := make([]byte, 200*32<<10)
	for i := range sent {
		sent[i] = byte(i >> 8)
	}
	start := time.Now()
	go func() {
		_, _ = conn.Write(sent)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn) // ends only if the end of the stream is passed on
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, sent) {
		t.Errorf("got %d bytes back, not the %d that were sent, in order", len(got), len(sent))
	}
	if took := time.Since(start); took > 100*delay {
		t.Errorf("%d bytes took %v", len(sent), took)
	}
}

func TestSlowLinkCloseEndsItsConnections(t *testing.T) {
	t.Parallel()
	link, err := newSlowLink(echo(t), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialTCP("tcp", nil, link.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("under way for an hour")); err != nil {
		t.Fatal(err)
	}
	if err := link.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is still open")
	}
}

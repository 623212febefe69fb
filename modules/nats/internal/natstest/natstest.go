// Package natstest connects tests to the shared NATS.
package natstest

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Name returns a name that no other test has. Streams whose names begin with it are deleted when the test ends.
func Name(t testing.TB, conn *nats.Conn) string {
	t.Helper()
	name := "t" + strings.ToLower(rand.Text()[:10])
	t.Cleanup(func() {
		js := JetStream(t, conn)
		names := js.StreamNames(context.WithoutCancel(t.Context()))
		for stream := range names.Name() {
			if !strings.HasPrefix(stream, name) {
				continue
			}
			if err := js.DeleteStream(context.WithoutCancel(t.Context()), stream); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Error(err)
			}
		}
	})
	return name
}

// Connect returns a connection that reconnects for ever and soon. It is closed when the test ends.
func Connect(t testing.TB, url string) *nats.Conn {
	t.Helper()
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.RetryOnFailedConnect(true), nats.Timeout(10*time.Second), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	conn.SetClosedHandler(func(*nats.Conn) { close(closed) })
	t.Cleanup(func() {
		conn.Close()
		<-closed
	})
	return conn
}

// New returns a connection to the shared server.
func New(t testing.TB) *nats.Conn {
	t.Helper()
	return Connect(t, testenv.NATSURL(t))
}

// JetStream returns the client of a connection.
func JetStream(t testing.TB, conn *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(conn, jetstream.WithDefaultTimeout(testenv.Patience))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

package amqpconn_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// Errors of a dial are logged, so they must not quote a URL that cannot be parsed.
func TestDialErrorHidesURL(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"amqp://user:sec%ret@localhost/", "amqp://user:sec/ret@localhost/"} {
		_, err := amqpconn.Open(t.Context(), func(context.Context) (*amqp.Connection, error) { return amqp.Dial(url) }, time.Second)
		if err == nil || strings.Contains(err.Error(), "sec") || strings.Contains(err.Error(), "ret") {
			t.Errorf("error %v", err)
		}
	}
}

// Package net begins its errors with "dial" itself.
func TestDialErrorIsNotDoubled(t *testing.T) {
	t.Parallel()
	_, err := amqpconn.Open(t.Context(), func(context.Context) (*amqp.Connection, error) { return amqp.Dial("amqp://127.0.0.1:1/") }, time.Second)
	if err == nil || !strings.HasPrefix(err.Error(), "dial tcp ") {
		t.Errorf("error %v", err)
	}
}

func TestRecoveryIsRefused(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	dial := func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(b.URL, amqp.Config{Recovery: &amqp.Recovery{}})
	}
	conn, err := amqpconn.Open(t.Context(), dial, testenv.Patience)
	if err == nil || !strings.Contains(err.Error(), "recovery") {
		t.Errorf("connection %v, error %v", conn, err)
	}
}

func TestDialIgnoresContext(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	release := make(chan struct{})
	late := make(chan *amqp.Connection, 1)
	dial := func(context.Context) (*amqp.Connection, error) {
		<-release
		conn, err := amqp.Dial(b.URL)
		late <- conn
		return conn, err
	}
	_, err := amqpconn.Open(t.Context(), dial, 50*time.Millisecond)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v", err)
	}
	close(release)
	conn := <-late
	testenv.Eventually(t, func() error {
		if !conn.IsClosed() {
			return errors.New("the late connection is open")
		}
		return nil
	})
}

// The client writes to the properties of its Config. Dials that share one Config must not race.
func TestDialURLLeavesItsConfigAlone(t *testing.T) {
	t.Parallel()
	properties := amqp.Table{"connection_name": "dialled twice"}
	dial := amqpconn.DialURL(amqptest.New(t).URL, amqp.Config{Properties: properties})
	ended := make(chan error)
	for range 2 {
		go func() {
			conn, err := dial(t.Context())
			if err == nil {
				err = conn.Close()
			}
			ended <- err
		}()
	}
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if len(properties) != 1 {
		t.Errorf("the client wrote to the properties: %v", properties)
	}
}

// counted counts the calls of Write.
type counted struct {
	net.Conn
	mu    sync.Mutex
	calls int
}

func (c *counted) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.calls++
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func TestGatherWrites(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		raw := &counted{Conn: ours}
		conn := amqpconn.GatherWrites(raw)
		var want []byte
		for i := range 1000 { // nobody reads yet
			p := []byte{byte(i), byte(i >> 8)}
			want = append(want, p...)
			if n, err := conn.Write(p); n != 2 || err != nil {
				t.Fatal(n, err)
			}
			p[0]++ // the bytes were copied
		}
		synctest.Wait()
		got := make(chan []byte)
		go func() {
			b, _ := io.ReadAll(theirs)
			got <- b
		}()
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(<-got, want) {
			t.Error("the bytes were changed on their way, or not all written before the close")
		}
		if raw.calls > 3 {
			t.Errorf("%d calls for 1000 small writes", raw.calls)
		}
		if _, err := conn.Write([]byte{1}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// A peer that reads nothing blocks the writer in the end, and Close unblocks it.
func TestGatherWritesIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		conn := amqpconn.GatherWrites(ours)
		failed := make(chan error, 1)
		var taken int
		go func() {
			p := make([]byte, 1<<10)
			for {
				n, err := conn.Write(p)
				if err != nil {
					failed <- err
					return
				}
				taken += n
			}
		}()
		synctest.Wait()
		if taken < 256<<10 || taken > 600<<10 {
			t.Errorf("%d bytes were taken", taken)
		}
		began := time.Now()
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("Close took %v", took)
		}
		if err := <-failed; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
}

func TestGatherWritesReportsAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		conn := amqpconn.GatherWrites(ours)
		theirs.Close()
		if _, err := conn.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, err := conn.Write([]byte{1}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("second write: %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
}

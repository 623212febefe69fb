package amqpconn_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

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
			p[0]++ // the bytes were taken over
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

// A peer that reads nothing stops the writer in the end, and Close frees it.
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

package inboxredis_test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
)

// Messages that all together would not come within the timeout come in portions, also when those
// before them were small.
func TestSlowWay(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, ordered)
			const small, large = 200, 100
			for n := range small + large {
				m := event()
				if n >= small {
					m.Body = []byte(`"` + strings.Repeat("x", 100<<10) + `"`)
				}
				publish(t, f.direct, m)
			}
			opts := *f.direct.Options()
			opts.Addr = slowWay(t, opts.Addr, 1<<20)
			client := redis.NewClient(&opts)
			defer func() { _ = client.Close() }()
			source := running(t, newSource(t, client, inboxredis.Config{Timeout: time.Second, ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}))
			deadline := time.Now().Add(2 * time.Minute)
			for left := small + large; left > 0; {
				if time.Now().After(deadline) {
					t.Fatalf("%d of %d messages are left", left, small+large)
				}
				left -= consume(t, source, left)
			}
		})
	}
}

// consume returns how many messages a session got and settled before it ended, or had so many.
func consume(t *testing.T, source driver.Source, want int) (got int) {
	t.Helper()
	s, err := source.Open(t.Context())
	if err != nil {
		return 0
	}
	defer func() { _ = s.Close(t.Context()) }()
	for err = s.Start(t.Context(), want); err == nil && got < want; {
		var ds []driver.Delivery
		if ds, err = s.Receive(t.Context(), want); err != nil {
			break
		}
		if err = s.Ack(t.Context(), ds); err == nil {
			got += len(ds)
		}
	}
	return got
}

// slowWay passes on so many bytes a second of what a server answers, over each connection.
func slowWay(t *testing.T, server string, rate int) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", server)
			if err != nil {
				_ = client.Close()
				continue
			}
			all.Go(func() {
				defer up.Close()
				_, _ = io.Copy(up, client)
			})
			all.Go(func() {
				defer client.Close()
				_, _ = io.Copy(client, slowly{up, rate})
			})
		}
	})
	return listener.Addr().String()
}

// slowly reads so many bytes a second.
type slowly struct {
	io.Reader
	rate int
}

func (s slowly) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p[:min(len(p), 16<<10)])
	time.Sleep(time.Duration(n) * time.Second / time.Duration(s.rate))
	return n, err
}

package inboxredis_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Messages that all together would not come within the timeout come in portions, also when those
// before them were small.
func TestSlowWay(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			if ordered {
				testenv.Nightly(t, "the shared stream is read with every change")
			}
			f := newFixture(t, ordered)
			const small, large = 100, 30
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
			source := running(t, newSource(t, client, inboxredis.Config{Timeout: 2 * time.Second, ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}))
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			came := map[uuid.UUID]bool{}
			for len(came) < small+large {
				if ctx.Err() != nil {
					t.Fatalf("%d of %d messages came", len(came), small+large)
				}
				consume(ctx, source, small+large, came)
			}
		})
	}
}

// consume settles what a session gets before it ends, or until so many messages came. One whose Ack was not answered may
// be settled, and not come again.
func consume(ctx context.Context, source driver.Source, want int, came map[uuid.UUID]bool) {
	s, err := source.Open(ctx)
	if err != nil {
		return
	}
	defer func() { _ = s.Close(context.WithoutCancel(ctx)) }()
	for err = s.Start(ctx, want); err == nil && len(came) < want; {
		var ds []driver.Delivery
		if ds, err = s.Receive(ctx, want); err != nil {
			return
		}
		for _, d := range ds {
			came[d.Message().ID] = true
		}
		err = s.Ack(ctx, ds, false)
	}
}

// slowWay passes on so many bytes a second of what a server answers, over each connection.
func slowWay(t *testing.T, server string, rate int) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
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

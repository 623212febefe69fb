package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// onSilent runs a test in a bubble. The clock stands still while the real server works.
func onSilent(t *testing.T, set func(*redis.Options), test func(t *testing.T, server *silent.Redis, client *redis.Client)) {
	t.Helper()
	url := redistest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		server := silent.NewRedis(t, url)
		test(t, server, server.Client(t, set))
	})
}

// A client whose own timeout ends a call leaves no claim behind.
func TestClientWithATimeoutOfItsOwn(t *testing.T) {
	t.Parallel()
	onSilent(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Second, -1 }, func(t *testing.T, server *silent.Redis, client *redis.Client) {
		p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { return nil })
		server.SilenceOn(testenv.Silence{On: "processing:", Deliver: true})
		m := event()
		start := time.Now()
		if err := process(t, p, m); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != time.Second || server.Silenced() != 1 {
			t.Errorf("took %v, %d connections silent", took, server.Silenced())
		}
	})
}

// A connection that falls silent in the middle of a script is given up, also by a client that would
// wait for ever, and no claim that was left behind keeps the message from being processed.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"claim":                {On: "processing:"},
		"claim, which arrives": {On: "processing:", Deliver: true},
		"every idle one":       {},
		"mark":                 {On: "done:"},
		"mark, which arrives":  {On: "done:", Deliver: true},
	} {
		for _, heeds := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/heeds deadlines %v", name, heeds), func(t *testing.T) {
				t.Parallel()
				onSilent(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.ReadTimeout, o.PoolSize = heeds, -1, 50
				}, func(t *testing.T, server *silent.Redis, client *redis.Client) {
					testSilentConnection(t, server, client, silence)
				})
			})
		}
	}
}

func testSilentConnection(t *testing.T, server *silent.Redis, client *redis.Client, silence testenv.Silence) {
	runs, want := 0, 2*time.Second // one try
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { runs++; return nil })
	if silence == (testenv.Silence{}) {
		var held []*redis.Conn
		for range 8 {
			conn := client.Conn()
			if err := conn.Ping(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			held = append(held, conn)
		}
		for _, conn := range held {
			_ = conn.Close() // back to the pool
		}
		server.SilenceConnections()
		want = 5 * time.Second // two tries, and the second before the message is delivered again
	} else {
		server.SilenceOn(silence)
	}
	m := event()
	start := time.Now()
	for {
		err := process(t, p, m)
		if err == nil {
			break
		}
		if f := driver.Classify(err); f.Counted || !errors.Is(err, driver.ErrUnavailable) && !errors.Is(err, inboxredis.ErrInProgress) {
			t.Fatalf("%v classified %+v", err, f)
		}
		time.Sleep(time.Second)
	}
	if took := time.Since(start); took != want {
		t.Errorf("the message took %v, want %v", took, want)
	}
	if err := process(t, p, m); err != nil || runs != 1 {
		t.Errorf("the second delivery: %v after %d runs", err, runs)
	}
}

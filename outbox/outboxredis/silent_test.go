package outboxredis_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// onSilent runs a test in a bubble, with a publisher whose Timeout is a second. Its client waits for ever,
// whatever its contexts say. The clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher)) {
	t.Helper()
	url := redistest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		server := silent.NewRedis(t, url)
		client := server.Client(t, func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.MaxRetries = -1, -1, -1 })
		test(t, server, newPublisher(t, client, outboxredis.Config{Timeout: time.Second}))
	})
}

// graceful is the timeout and the second that a client has to notice it.
const graceful = 2 * time.Second

// A connection that falls silent, at each step, fails the message that waits on it in time; the next message
// goes by another.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"handshake":             {On: "hello"},
		"message":               {On: "the body"},
		"message, which counts": {On: "the body", Deliver: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher) {
				server.SilenceOn(silence)
				start := time.Now()
				if err := publish(t, p, driver.Message{Name: "a", Body: []byte("the body")}); driver.ClassOf(err) != driver.Unavailable {
					t.Errorf("a silent connection: %v", err)
				}
				if err := publish(t, p, driver.Message{Name: "a"}); err != nil {
					t.Errorf("the next message: %v", err)
				}
				if took := time.Since(start); took != graceful || server.Silenced() != 1 {
					t.Errorf("both took %v, %d connections silent", took, server.Silenced())
				}
			})
		})
	}
}

// Ready and Check answer in time, also without a deadline of the caller.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	onSilent(t, func(t *testing.T, server *silent.Redis, p *outboxredis.Publisher) {
		if err := p.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		server.Pause()
		for name, call := range map[string]func() error{
			"Ready": func() error { return p.Ready(t.Context()) },
			"Check": func() error { return p.Check(t.Context()) },
		} {
			start := time.Now()
			if err := call(); err == nil {
				t.Errorf("%s is content with a silent server", name)
			}
			if took := time.Since(start); took != graceful {
				t.Errorf("%s took %v", name, took)
			}
		}
	})
}

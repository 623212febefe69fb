package outboxredis_test

import (
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// patient is a client that waits for ever, whatever its contexts say.
func patient(t *testing.T, url string) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	opts.ReadTimeout, opts.WriteTimeout, opts.MaxRetries = -1, -1, -1
	client := redis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() }) // ends what waits
	return client
}

// A connection that falls silent, at each step, fails what waits on it in time; the next message
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
			proxy := testenv.NewProxy(t, redistest.URL(t))
			proxy.SilenceOn(silence)
			p := newPublisher(t, patient(t, proxy.URL()), outboxredis.Config{Timeout: time.Second})
			began := time.Now()
			if err := publish(t, p, driver.Message{Name: "a", Body: []byte("the body")}); driver.ClassOf(err) != driver.Unavailable {
				t.Errorf("a silent connection: %v", err)
			}
			if took := time.Since(began); took > 30*time.Second { // a second, and one more
				t.Errorf("reported after %v", took)
			}
			testenv.Eventually(t, func() error { return publish(t, p, driver.Message{Name: "a"}) })
		})
	}
}

// Ready and Check answer in time, also without a deadline of the caller.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	p := newPublisher(t, patient(t, proxy.URL()), outboxredis.Config{Timeout: time.Second})
	testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
	proxy.Pause()
	for name, call := range map[string]func() error{
		"Ready": func() error { return p.Ready(t.Context()) },
		"Check": func() error { return p.Check(t.Context()) },
	} {
		ended := make(chan error, 1)
		go func() { ended <- call() }()
		select {
		case err := <-ended:
			if err == nil {
				t.Errorf("%s is content with a silent server", name)
			}
		case <-time.After(testenv.Patience):
			t.Error(errors.New(name + " does not end"))
		}
	}
}

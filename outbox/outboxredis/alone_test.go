package outboxredis_test

import (
	"bytes"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// publishAll publishes all at once, so that they share pipelines, and returns their outcomes.
func publishAll(t *testing.T, p *outboxredis.Publisher, msgs []driver.Message) []error {
	t.Helper()
	outcomes := make([]error, len(msgs))
	var pending sync.WaitGroup
	for i, m := range msgs {
		pending.Add(1)
		p.Publish(t.Context(), m, func(err error) {
			outcomes[i] = err
			pending.Done()
		})
	}
	pending.Wait()
	return outcomes
}

// wantAloneToFail publishes good messages with bad ones among them, the first included.
func wantAloneToFail(t *testing.T, p *outboxredis.Publisher, bad driver.Message, want driver.Class) {
	t.Helper()
	var msgs []driver.Message
	for i := range 200 {
		m := driver.Message{Name: "good", Exchange: "good"}
		if i%50 == 0 {
			m = bad
		}
		m.ID = uuid.Must(uuid.NewV7())
		msgs = append(msgs, m)
	}
	for i, err := range publishAll(t, p, msgs) {
		switch {
		case i%50 == 0 && (err == nil || driver.ClassOf(err) != want):
			t.Errorf("bad message %d: %v, want %s", i, err, want)
		case i%50 != 0 && err != nil:
			t.Errorf("good message %d: %v", i, err)
		}
	}
}

func TestWrongTypeFailsAlone(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	must(t, client.Set(t.Context(), "text", "1", 0).Err())
	bad := driver.Message{Name: "bad", Exchange: "text"}
	wantAloneToFail(t, newPublisher(t, client, outboxredis.Config{}), bad, driver.Unroutable)
}

// A stream that is closed to this user is no outage, a command that is closed is one.
func TestForbiddenStreamFailsAlone(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	admin := redistest.Client(t, server.URL())
	as := func(user string, rules ...any) *redis.Client {
		must(t, admin.Do(t.Context(), append([]any{"ACL", "SETUSER", user, "on", ">password"}, rules...)...).Err())
		opts := *admin.Options()
		opts.Username, opts.Password = user, "password"
		client := redis.NewClient(&opts)
		t.Cleanup(func() { _ = client.Close() }) // nothing to lose
		return client
	}
	bad := driver.Message{Name: "bad", Exchange: "other"}
	wantAloneToFail(t, newPublisher(t, as("few", "~good*", "+@all"), outboxredis.Config{}), bad, driver.Unroutable)
	none := newPublisher(t, as("none", "~*", "+@all", "-xadd"), outboxredis.Config{})
	if err := publish(t, none, driver.Message{Name: "good"}); driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("no right to write at all: %v", err)
	}
}

// Redis ends the connection over a command that is too large for it, and all that is on its way there
// gets no answer.
func TestTooLargeForRedisFailsAlone(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--proto-max-bulk-len", "1mb")
	bad := driver.Message{Name: "bad", Body: bytes.Repeat([]byte("x"), 2<<20)}
	wantAloneToFail(t, newPublisher(t, redistest.Client(t, server.URL()), outboxredis.Config{}), bad, driver.Retryable)
}

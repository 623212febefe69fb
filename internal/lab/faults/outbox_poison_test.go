package faults_test

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

const (
	// maxSize is the broker's own limit, below the publisher's.
	maxSize = 65_536
	// poisonAttempts is after how many attempts a message is given up.
	poisonAttempts = 3
)

// panics is a publisher with a bug.
type panics struct{}

func (panics) Publish(context.Context, driver.Message, func(error)) { panic("a bug") }

// breaking is a reply address with a damaged process id, over which RabbitMQ 3.10 ends the connection
// with an internal error, without saying which message it means.
const breaking = "amq.rabbitmq.reply-to.g1hkAA5yZXBseUAxMjcuMC4wLjEAAAABAAAAAAAAAAA=.abc"

// poison are messages that cannot be delivered, with the class they die of.
var poison = map[string]struct {
	message outbox.Message
	classes []driver.Class // as the broker's release has it
}{
	"larger than the broker takes":    {outbox.Message{Body: bytes.Repeat([]byte("x"), maxSize+1), ContentType: "text/plain"}, []driver.Class{driver.Permanent}},
	"larger than the publisher sends": {outbox.Message{Body: bytes.Repeat([]byte("x"), maxBody+1), ContentType: "text/plain"}, []driver.Class{driver.Permanent}},
	"unroutable":                      {outbox.Message{Route: outbox.Route{RoutingKey: "nobody.listens"}}, []driver.Class{driver.Unroutable}},
	"exchange missing":                {outbox.Message{Route: outbox.Route{Exchange: "missing"}}, []driver.Class{driver.Unroutable}},
	"exchange missing too":            {outbox.Message{Route: outbox.Route{Exchange: "amq.missing"}}, []driver.Class{driver.Unroutable}},
	"exchange internal":               {outbox.Message{Route: outbox.Route{Exchange: "amq.rabbitmq.trace"}}, []driver.Class{driver.Unroutable}},
	"the broker breaks over it":       {outbox.Message{Transport: "direct", Route: outbox.Route{RoutingKey: breaking}}, []driver.Class{driver.Retryable, driver.Unroutable}},
	"transport unknown":               {outbox.Message{Transport: "pigeon"}, []driver.Class{driver.Retryable}},
	"publisher panics":                {outbox.Message{Transport: "panics"}, []driver.Class{driver.Retryable}},
}

// odd are messages that look like poison and are none.
var odd = map[string]outbox.Message{
	"no UTF-8":              {Body: []byte{0xff, 0xfe, 0, 0xc3, 0x28}, ContentType: "application/octet-stream"},
	"no body":               {ContentType: "text/plain"},
	"as large as it may be": {Body: bytes.Repeat([]byte("x"), maxSize), ContentType: "text/plain"},
	"many headers":          {Headers: manyHeaders(64, 60)},
	"large headers":         {Headers: map[string]string{"h": strings.Repeat("x", 16_000)}, Route: outbox.Route{Headers: map[string]string{"r": strings.Repeat("y", 16_000)}}},
	"header names":          {Headers: map[string]string{"x-delay": "soon", "x-match": "any", "expiration": "1", "x-expires": "1", "delivery-mode": "1", "x-received-from": "me", "x-priority": "high", "user_id": "root", "x-stream-offset": "first", "x-cc": "elsewhere", strings.Repeat("n", 128): ""}},
	"header values":         {Headers: map[string]string{"accents": "é ü ß", "wide": "日本語 🙂", "empty": "", "quotes": `"'\`, "number": "1e309"}},
	"a long key":            {Route: outbox.Route{RoutingKey: "faults." + strings.Repeat("k", 248)}},
	"default header":        {Headers: map[string]string{"traceparent": "not a trace", "tracestate": "=", "baggage": ";;"}},
}

func manyHeaders(n, size int) map[string]string {
	headers := map[string]string{}
	for i := range n {
		headers["header-"+strconv.Itoa(i)] = strings.Repeat("v", size)
	}
	return headers
}

// Every kind of poison lies between good messages, in their keys too. It dies of its own class, and
// holds up nothing but its key, until it is dead.
func TestOutboxPoison(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	server := testenv.Private(t, testenv.RabbitMQ, "max_message_size = "+strconv.Itoa(maxSize))
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, server.URL(), l)
	direct, err := outboxamqp.NewPublisher(outboxamqp.Dial(c.URL, amqp.Config{}), outboxamqp.Config{Logger: quiet})
	must(t, err)
	job := relayJob{
		Database: s.url, Broker: c.URL, Patience: 10 * time.Second, MaxAttempts: poisonAttempts,
		transports: map[string]driver.Publisher{"panics": panics{}, "direct": direct},
	}
	end := job.start(t)
	work, err := newLoad(s.pool, l, rng.Uint64(), 15*time.Millisecond)
	must(t, err)
	stop := beside(t, work.Run)

	want := map[uuid.UUID][]driver.Class{}
	kinds := map[uuid.UUID]string{}
	rounds := scaled(t, 1)
	for range rounds {
		for kind, p := range poison {
			id := s.writeDeed(work, ledger.KeyOf(rng.IntN(ledger.Keys)), p.message)
			l.Excuse(id)
			want[id], kinds[id] = p.classes, kind
		}
		for _, m := range odd {
			s.writeDeed(work, ledger.KeyOf(rng.IntN(ledger.Keys)), m)
		}
		// Without a key: order holds within a transport, and this one is paused by its poison.
		s.writeDeed(work, "", outbox.Message{Transport: "direct", Route: outbox.Route{RoutingKey: queue}})
		untilMore(t, l, 100)
	}
	stop()
	deeds := s.settle(l)
	end()
	c.untilDrained(t)
	// The broker ends the session, with all that is in flight, over a message that is too large, over
	// each attempt to publish to an exchange of its own, and once more than that over the one it breaks over.
	sessions := rounds * (1 + poisonAttempts + 1 + poisonAttempts)
	v := judge(t, l, deeds, bounds{duplicates: sessions * inFlight, depth: batch, excused: len(want)})
	if v.Excused != len(want) {
		t.Errorf("%d of %d poison messages arrived", len(want)-v.Excused, len(want))
	}

	messages, err := outboxpgx.New(s.pool, outboxpgx.Config{})
	must(t, err)
	letters, err := messages.DeadLetters().List(t.Context(), outbox.Filter{Limit: 10_000})
	must(t, err)
	for _, letter := range letters {
		if !slices.Contains(want[letter.ID], driver.Class(letter.Class)) {
			t.Errorf("dead of %s: %s %s, want %q (%s)", letter.Class, letter.Name, letter.ID, want[letter.ID], kinds[letter.ID])
		}
		attempts := poisonAttempts
		if letter.Class == string(driver.Permanent) {
			attempts = 1
		}
		if letter.Attempts != attempts {
			t.Errorf("%s: dead after %d attempts, want %d: %s", kinds[letter.ID], letter.Attempts, attempts, letter.Error)
		}
	}
	if len(letters) != len(want) {
		t.Errorf("%d dead letters, want %d", len(letters), len(want))
	}
}

// writeDeed commits one message of a key, or of none.
func (s *store) writeDeed(w *ledger.Writer, key string, m outbox.Message) uuid.UUID {
	s.t.Helper()
	m.ID = ids.New()
	if m.ContentType == "" {
		m.Body = []byte(`{}`)
	}
	must(s.t, pgx.BeginFunc(s.t.Context(), s.pool, func(tx pgx.Tx) error { return w.Write(s.t.Context(), tx, key, m) }))
	return m.ID
}

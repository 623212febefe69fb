package browser_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// TestHundredThousandDeadLetters requests the views of the page with that many dead letters in an outbox and a consumer,
// and logs the time of each. Kinds on RabbitMQ take longest: the page must read all letters within a minute. There are
// fewer letters there, so that a minute is enough on a busy machine, and no preview, which would read them again.
func TestHundredThousandDeadLetters(t *testing.T) {
	t.Parallel()
	const letters, onRabbitMQ = 100_000, 20_000
	t.Run("outbox", func(t *testing.T) {
		t.Parallel()
		url := site(t, operator.Config{Outboxes: []operator.Outbox{{Store: postgresOutbox(t, letters)}}})
		wantViews(t, url, letters, ">100,000<", "The oldest %d.")
		wantView(t, url+"dead-letters?error=order+99999", "1 in all")
		wantAllPages(t, url, letters)
		wantView(t, url+"preview?what=retry", `<span class="count">100000</span>`)
		wantView(t, url+"preview?what=drop&name=order.kind-1", ">5000<")
	})
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		url := siteOfConsumer(t, redisConsumer(t, letters), letters, "unrecoverable")
		wantView(t, url+"preview?what=retry", `<span class="count">100000</span>`)
	})
	t.Run("RabbitMQ", func(t *testing.T) {
		t.Parallel()
		siteOfConsumer(t, rabbitConsumer(t, onRabbitMQ), onRabbitMQ, "default") // RabbitMQ has one queue for all classes
	})
}

// siteOfConsumer serves the page of a consumer with the given number of dead letters of a class, and checks its views.
func siteOfConsumer(t *testing.T, c consumer, letters int, class string) (url string) {
	t.Helper()
	url = site(t, operator.Config{Consumers: []operator.Consumer{{Name: "billing", Consumer: c}}})
	wantViews(t, url, letters, fmt.Sprintf("%s %d,000<", class, letters/1000), "The first %d found.")
	wantView(t, url+"dead-letters?name=order.kind-1", "The first 100 found.")
	return url
}

// wantAllPages pages through all letters of an outbox.
func wantAllPages(t *testing.T, url string, letters int) {
	t.Helper()
	const perPage = 1000
	next := regexp.MustCompile(`rel="next" href="([^"]*)"`)
	address, seen := fmt.Sprint("dead-letters?from=outbox&limit=", perPage), map[string]bool{}
	for range letters / perPage {
		body := wantView(t, url+address, "")
		for _, id := range regexp.MustCompile(`value="outbox/([^"]*)"`).FindAllStringSubmatch(body, -1) {
			seen[id[1]] = true
		}
		if link := next.FindStringSubmatch(body); link != nil {
			address = html.UnescapeString(link[1])
		}
	}
	if len(seen) != letters {
		t.Errorf("on all pages are %d letters, want %d", len(seen), letters)
	}
}

// wantViews checks the views that are the same for an outbox and a consumer.
func wantViews(t *testing.T, url string, letters int, status, begin string) {
	t.Helper()
	wantView(t, url, status)
	wantView(t, url+"dead-letters", fmt.Sprintf(begin, 100))
	wantView(t, url+"dead-letters?limit=1000", fmt.Sprintf(begin, 1000))
	wantView(t, url+"groups", fmt.Sprintf(`<span class="count">%d</span>`, letters/kinds))
}

// wantView checks that a view is answered without a problem, such as a minute's timeout, and in at most a megabyte. A busy
// machine may need several requests.
func wantView(t *testing.T, url, part string) (body string) {
	t.Helper()
	testenv.Eventually(t, func() (err error) {
		body, err = view(t, url, part)
		return err
	})
	return body
}

// view requests a view once. On a busy machine a view may report that it could not read all letters within its minute.
func view(t *testing.T, url, part string) (string, error) {
	t.Helper()
	const most = 1 << 20
	began := time.Now()
	resp, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	t.Logf("%5.2f s %7d bytes %s", time.Since(began).Seconds(), len(body), resp.Request.URL.RequestURI())
	text := string(body)
	if err != nil || resp.StatusCode != http.StatusOK || len(body) > most || strings.Contains(text, `class="problem"`) || !strings.Contains(text, part) {
		return "", fmt.Errorf("%s: %s, %v, %d bytes, want %s in it: %.4000s", url, resp.Status, err, len(body), part, text)
	}
	return text, nil
}

var quiet = inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)}

// kinds is the number of kinds of letters.
const kinds = 20

// consumer is a consumer on any broker.
type consumer interface{ operator.DeadLetterer }

// consumerOf returns a stopped consumer in memory with dead letters of these names.
func consumerOf(t *testing.T, names ...string) consumer {
	t.Helper()
	broker, mux := inboxtest.NewBroker(), inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		return inbox.Unrecoverable(errors.New("no handler for " + m.Name))
	})
	c, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, mux, quiet)
	check(t, err)
	for _, name := range names {
		check(t, broker.Send(t.Context(), &inbox.Message{ID: ids.New(), Name: name, Body: []byte("{}")}))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	err = broker.Idle(t.Context())
	stop()
	check(t, errors.Join(err, <-ended))
	return c
}

// rabbitConsumer returns a consumer, not running, with dead letters of all kinds on RabbitMQ.
func rabbitConsumer(t *testing.T, letters int) consumer {
	t.Helper()
	const queue = "billing.failed.default"
	broker := amqptest.New(t)
	c, err := inboxamqp.NewConsumer(broker.Dial, inboxamqp.Queue{Name: "billing"}, inbox.NewMux(), quiet)
	check(t, err)
	check(t, c.Setup(t.Context()))
	ch := broker.Channel(t)
	for n := range letters {
		check(t, ch.PublishWithContext(t.Context(), "", queue, false, false, rabbitLetter(n)))
	}
	testenv.Eventually(t, func() error {
		if got := broker.Depth(t, queue); got != letters {
			return fmt.Errorf("%d of %d letters are there", got, letters)
		}
		return nil
	})
	return c
}

// redisConsumer returns a consumer, not running, with dead letters of all kinds on Redis Streams.
func redisConsumer(t *testing.T, letters int) consumer {
	t.Helper()
	const stream, atOnce = "shop", 1000
	client := redistest.New(t)
	named := quiet
	named.Name = "billing"
	c, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: stream}, inbox.NewMux(), named)
	check(t, err)
	check(t, c.Setup(t.Context()))
	pipe := client.Pipeline()
	for n := range letters {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: "{" + stream + "}:billing:failed.unrecoverable", Values: redisLetter(n)})
		if n%atOnce == atOnce-1 || n == letters-1 {
			_, err := pipe.Exec(t.Context())
			check(t, err)
		}
	}
	return c
}

// redisLetter is a dead letter in the form that a consumer stores.
func redisLetter(n int) []any {
	like := rabbitLetter(n)
	fields := []any{
		"id", like.MessageId, "name", like.Type, "content-type", like.ContentType, "created-at", like.Timestamp.UTC().Format(time.RFC3339Nano), "body", like.Body,
	}
	for name, value := range like.Headers {
		if name != "holdfast-origin-queue" { // only on RabbitMQ
			fields = append(fields, name, value)
		}
	}
	return fields
}

// rabbitLetter is a dead letter in the form that a consumer publishes.
func rabbitLetter(n int) amqp.Publishing {
	kind, failed := n%kinds, time.Now().UTC().Add(-time.Minute).Format(time.RFC3339Nano)
	return amqp.Publishing{
		MessageId: ids.New().String(), Type: fmt.Sprintf("order.kind-%d", kind), ContentType: "application/json", DeliveryMode: amqp.Persistent,
		Timestamp: time.Now(), Body: []byte(`{"order":` + strconv.Itoa(n) + `}`),
		Headers: amqp.Table{
			"holdfast-attempt": "1", "holdfast-failure-class": "unrecoverable", "holdfast-error": "no handler", "holdfast-error-type": "*errors.errorString",
			"holdfast-fingerprint": fmt.Sprintf("%016d", kind), "holdfast-first-failed-at": failed, "holdfast-last-failed-at": failed,
			"holdfast-consumer": "billing", "holdfast-origin-queue": "billing",
		},
	}
}

// postgresOutbox returns an outbox with dead letters of all kinds.
func postgresOutbox(t *testing.T, letters int) *outboxpgx.Store {
	t.Helper()
	pool, schema := pgtest.NewSchema(t)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Schema: schema, Logger: quiet.Logger})
	check(t, err)
	check(t, store.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, ordering_key, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		SELECT encode(set_bit(set_bit(set_byte(uuid_send(gen_random_uuid()), 6, 112), 0, 0), 1, 0), 'hex')::uuid, n, n % 16, 'order.kind-' || n % $2,
		  convert_to('{"order":' || n || '}', 'UTF8'), 'application/json', 'customer ' || n % 1000, '', '', '', now(), 5, 'permanent', 'no exchange for order ' || n
		FROM generate_series(1, $1::int) n`, letters, kinds)
	check(t, err)
	return store
}

// site serves an operator's page in this process, and returns its address.
func site(t *testing.T, cfg operator.Config) (url string) {
	t.Helper()
	cfg.Log = &operator.MemoryLog{}
	handler, err := page.New(cfg, page.Config{Authorize: func(*http.Request) (operator.Access, error) {
		return operator.Access{By: "ada", Bodies: true, Change: true}, nil
	}})
	check(t, err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	t.Cleanup(handler.Close)
	return server.URL + "/"
}

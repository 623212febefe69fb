package browser_test

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime/debug"
	"runtime/metrics"
	"slices"
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

// TestHundredThousandDeadLetters requests each view of the page with 100,000 dead letters, a thousand of them with bodies of
// 1 MiB, on each server. Most answers take at most 300 ms, and the process has at most 64 MiB of heap meanwhile. No other
// test runs at the same time.
func TestHundredThousandDeadLetters(t *testing.T) {
	const place = "letters"
	for name, cfg := range map[string]func(*testing.T) operator.Config{
		"outbox": func(t *testing.T) operator.Config {
			return operator.Config{Outboxes: []operator.Outbox{{Name: place, Store: postgresOutbox(t, letters)}}}
		},
		"Redis": func(t *testing.T) operator.Config {
			return operator.Config{Consumers: []operator.Consumer{{Name: place, Consumer: redisConsumer(t, letters)}}}
		},
		"RabbitMQ": func(t *testing.T) operator.Config {
			return operator.Config{Consumers: []operator.Consumer{{Name: place, Consumer: rabbitConsumer(t, letters)}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			large := &measured{t: t, url: site(t, cfg(t))}
			first, one, all, some := "The first %d found.", "1 in all", `<span class="count">100,000</span> would`, `<span class="count">5,000</span> would`
			switch name {
			case "outbox":
				first = "The oldest %d."
			case "RabbitMQ": // it needs a minute or more to deliver them all: once is enough
				one, all, some = "<h1>", "<h1>", "<h1>"
			}
			large.want("", ">100,000<")
			list := large.want("dead-letters", fmt.Sprintf(first, 100))
			large.want("dead-letters?limit=1000", fmt.Sprintf(first, 1000))
			large.want("groups", `<span class="count">5,000</span>`)
			large.want("dead-letters?name=order.kind-1", fmt.Sprintf(first, 100))
			large.want("dead-letters?error=order+99999", one)
			large.want("preview?what=retry", all)
			large.want("preview?what=drop&name=order.kind-1", some)
			letter := regexp.MustCompile(`href="(dead-letter\?[^"]*)"`).FindStringSubmatch(list)
			large.want(html.UnescapeString(letter[1]), "order.kind-")
			large.want(html.UnescapeString(letter[1])+"&body=1", "{&#34;order&#34;:0,")
			large.want("waiting", "None is waiting")
			large.want("limits", "<h1>Rate limits</h1>")
			large.want("retrying", "<h1>Retrying</h1>")
			large.want("running", "<h1>Running</h1>")
			large.want("log", "No actions yet")
			if name == "outbox" {
				large.wantAllPages(place)
			}
		})
	}
}

// letters is the number of dead letters.
const letters = 100_000

// bodyOf returns the body of a dead letter: the oldest 500 and 500 more have 1 MiB.
func bodyOf(n int) []byte {
	body := fmt.Appendf(nil, `{"order":%d`, n)
	if n < 500 || n%199 == 0 {
		body = fmt.Appendf(body, `,"notes":%q`, filler)
	}
	return append(body, '}')
}

// filler is a text of 1 MiB that Postgres cannot compress.
var filler = func() string {
	raw := make([]byte, 3<<18)
	_, _ = rand.Read(raw) // it never fails
	return base64.StdEncoding.EncodeToString(raw)
}()

// measured requests views, and checks their time and the heap.
type measured struct {
	t   *testing.T
	url string
}

// want requests a view until it has a part, and at least five times. Most answers must come in time.
func (m *measured) want(view, part string) (body string) {
	m.t.Helper()
	const least, most, inTime, longest = 5, 4 << 20, 300 * time.Millisecond, 10 * time.Minute
	var took []time.Duration
	debug.FreeOSMemory()
	heap := watchHeap()
	began, there := time.Now(), time.Duration(0)
	for len(took) < least || there == 0 {
		requested := time.Now()
		resp, err := http.Get(m.url + view)
		check(m.t, err)
		page, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
		check(m.t, errors.Join(err, resp.Body.Close()))
		took = append(took, time.Since(requested))
		body = string(page)
		if resp.StatusCode != http.StatusOK || len(page) > most || strings.Contains(body, `class="problem"`) || time.Since(began) > longest {
			m.t.Fatalf("%s: %s, %d bytes, want %s in it: %.4000s", view, resp.Status, len(page), part, body)
		}
		switch {
		case there != 0:
		case strings.Contains(body, part):
			there = time.Since(began)
		default:
			time.Sleep(100 * time.Millisecond) // timing: a page that is not complete reloads
		}
	}
	peak := heap()
	first := took[0]
	slices.Sort(took)
	middle := took[len(took)/2]
	m.t.Logf("%4d ms, first %4d ms, complete after %5d ms, heap %2d MiB, %7d bytes: %s", middle.Milliseconds(), first.Milliseconds(), there.Milliseconds(), peak>>20, len(body), view)
	if middle > inTime {
		m.t.Errorf("%s takes %v, want %v", view, middle, inTime)
	}
	if peak > 64<<20 {
		m.t.Errorf("%s: the heap grows to %d MiB", view, peak>>20)
	}
	return body
}

// watchHeap samples the heap until it is called, and returns the largest size of its objects, garbage included.
func watchHeap() (peak func() uint64) {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	end, largest := make(chan struct{}), make(chan uint64)
	go func() {
		most := uint64(0)
		for tick := time.NewTicker(time.Millisecond); ; {
			metrics.Read(sample)
			most = max(most, sample[0].Value.Uint64())
			select {
			case <-tick.C:
			case <-end:
				tick.Stop()
				largest <- most
				return
			}
		}
	}()
	return func() uint64 {
		close(end)
		return <-largest
	}
}

// wantAllPages pages through all letters of an outbox.
func (m *measured) wantAllPages(place string) {
	m.t.Helper()
	const perPage = 1000
	next := regexp.MustCompile(`rel="next" href="([^"]*)"`)
	address, seen := fmt.Sprintf("dead-letters?from=%s&limit=%d", place, perPage), map[string]bool{}
	for range letters / perPage {
		resp, err := http.Get(m.url + address)
		check(m.t, err)
		body, err := io.ReadAll(resp.Body)
		check(m.t, errors.Join(err, resp.Body.Close()))
		for _, id := range regexp.MustCompile(`value="`+place+`/([^"]*)"`).FindAllSubmatch(body, -1) {
			seen[string(id[1])] = true
		}
		if link := next.FindSubmatch(body); link != nil {
			address = html.UnescapeString(string(link[1]))
		}
	}
	if len(seen) != letters {
		m.t.Errorf("on all pages are %d letters, want %d", len(seen), letters)
	}
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
	const stream, atOnce = "shop", 20
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
		Timestamp: time.Now(), Body: bodyOf(n),
		Headers: amqp.Table{
			"holdfast-attempt": "1", "holdfast-failure-class": "unrecoverable", "holdfast-error": fmt.Sprint("no handler for order ", n), "holdfast-error-type": "*errors.errorString",
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
		  convert_to('{"order":' || n || CASE WHEN n < 500 OR n % 199 = 0 THEN ',"notes":"' || $3 || '"' ELSE '' END || '}', 'UTF8'),
		  'application/json', 'customer ' || n % 1000, '', '', '', now(), 5, 'permanent', 'no exchange for order ' || n
		FROM generate_series(0, $1::int - 1) n`, letters, kinds, filler)
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

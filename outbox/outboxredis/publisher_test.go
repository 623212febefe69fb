package outboxredis_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestConformance(t *testing.T) {
	t.Parallel()
	redistest.New(t) // skips before there are subtests
	conformance.TestPublisher(t, conformance.PublisherBackend{Open: func(t *testing.T) conformance.PublisherCase {
		url := redistest.URL(t)
		proxy := testenv.NewProxy(t, url)
		direct := redistest.Client(t, url)
		must(t, direct.Set(t.Context(), "not-a-stream", "1", 0).Err())
		lost := driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "lost", Body: []byte("1"), Exchange: "not-a-stream"}
		p := newPublisher(t, redistest.Client(t, proxy.URL()), outboxredis.Config{})
		return conformance.PublisherCase{
			Publisher: p,
			Received: func(ctx context.Context) ([]driver.Message, error) {
				return received(ctx, direct, "outbox")
			},
			Unroutable: lost,
			Break:      proxy.Cut,
			Fix:        proxy.Heal,
		}
	}})
}

func newPublisher(t *testing.T, client redis.UniversalClient, cfg outboxredis.Config) *outboxredis.Publisher {
	t.Helper()
	p, err := outboxredis.NewPublisher(client, cfg)
	must(t, err)
	return p
}

func received(ctx context.Context, client *redis.Client, stream string) ([]driver.Message, error) {
	entries, err := client.XRange(ctx, stream, "-", "+").Result()
	if err != nil {
		return nil, err
	}
	var msgs []driver.Message
	for _, e := range entries {
		field := func(name string) string { s, _ := e.Values[name].(string); return s }
		m := driver.Message{Name: field("name"), ContentType: field("content-type"), Key: field("key"), Body: []byte(field("body"))}
		var err error
		if m.ID, err = uuid.Parse(field("id")); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(field("headers")), &m.Headers); err != nil {
			return nil, err
		}
		msgs = append(msgs, m)
	}
	return msgs, nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// publish returns the outcome of one message.
func publish(t *testing.T, p *outboxredis.Publisher, m driver.Message) error {
	t.Helper()
	outcome := make(chan error, 1)
	p.Publish(t.Context(), m, func(err error) { outcome <- err })
	return <-outcome
}

func TestRouteChoosesTheStream(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	p := newPublisher(t, client, outboxredis.Config{Stream: "shop", Routes: map[string]outbox.Route{
		"audit.done": {Exchange: "audit", Headers: map[string]string{"h": "v"}},
	}})
	for _, name := range []string{"order.placed", "audit.done"} {
		m := conformance.NewMessage(t, name, 1)
		m.ContentType = "" // as from outside a store
		must(t, publish(t, p, m))
	}
	for stream, name := range map[string]string{"shop": "order.placed", "audit": "audit.done"} {
		got, err := received(t.Context(), client, stream)
		if err != nil || len(got) != 1 || got[0].Name != name || got[0].ContentType != "application/json" {
			t.Errorf("stream %s holds %+v, %v", stream, got, err)
		}
		if stream == "audit" && got[0].Headers["h"] != "v" {
			t.Errorf("headers %v", got[0].Headers)
		}
	}
}

func TestMaxLen(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	p := newPublisher(t, client, outboxredis.Config{MaxLen: 10})
	outcomes := make(chan error, 1000)
	for range 1000 {
		p.Publish(t.Context(), driver.Message{Name: "a"}, func(err error) { outcomes <- err })
	}
	for range 1000 {
		must(t, <-outcomes)
	}
	if n := client.XLen(t.Context(), "outbox").Val(); n < 10 || n > 300 {
		t.Errorf("%d entries are kept", n) // Redis deletes whole nodes of about 100 entries
	}
}

func TestOutOfMemoryIsBlocked(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
	client := redistest.Client(t, server.URL())
	p := newPublisher(t, client, outboxredis.Config{})
	err := publish(t, p, driver.Message{Name: "a", Body: []byte(strings.Repeat("x", 2<<20))})
	if err == nil {
		err = publish(t, p, driver.Message{Name: "a"})
	}
	if driver.ClassOf(err) != driver.Blocked {
		t.Errorf("answered with %v", err)
	}
}

func TestCheckAndReady(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	p := newPublisher(t, client, outboxredis.Config{Stream: "s"})
	if err := p.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	if err := p.Check(t.Context()); err != nil {
		t.Error(err)
	}
	must(t, client.Set(t.Context(), "s", "1", 0).Err())
	if err := p.Check(t.Context()); fixes(err) != 1 {
		t.Error(err)
	}
	for name, tt := range map[string]struct {
		cfg  outboxredis.Config
		want int
	}{
		"by name":    {outboxredis.Config{Stream: "u", Routes: map[string]outbox.Route{"a": {Exchange: "s"}}}, 1},
		"by default": {outboxredis.Config{Stream: "s", Routes: map[string]outbox.Route{"a": {RoutingKey: "x"}}}, 1},
		"elsewhere":  {outboxredis.Config{Stream: "u", Routes: map[string]outbox.Route{"a": {Exchange: "t"}}}, 0},
	} {
		p := newPublisher(t, client, tt.cfg)
		if err := p.Check(t.Context()); fixes(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
	}
	if used, size := p.Window(); used != 0 || size != 1000 {
		t.Errorf("%d of %d in flight", used, size)
	}
}

// fixes returns the number of findings in err, or -1 if another error is among them.
func fixes(err error) (n int) {
	if err == nil {
		return 0
	}
	for _, one := range err.(interface{ Unwrap() []error }).Unwrap() {
		if _, ok := one.(interface{ Fix() string }); !ok {
			return -1
		}
		n++
	}
	return n
}

// A server may hide its configuration. A server that does not answer is reported.
func TestCheckWithoutConfiguration(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if err := newPublisher(t, redistest.Configless(client, redistest.Refusal("NOPERM")), outboxredis.Config{Stream: "s"}).Check(t.Context()); err != nil {
		t.Errorf("refused: %v", err)
	}
	if err := newPublisher(t, redistest.Configless(client, io.ErrUnexpectedEOF), outboxredis.Config{Stream: "s"}).Check(t.Context()); !errors.Is(err, io.ErrUnexpectedEOF) || fixes(err) != -1 {
		t.Errorf("without an answer: %v", err)
	}
}

func TestNewPublisherRefuses(t *testing.T) {
	t.Parallel()
	_, err := outboxredis.NewPublisher(nil, outboxredis.Config{MaxLen: -1, Timeout: -1, Format: format.Symfony{IDStamp: "no class"}})
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) || len(joined.Unwrap()) != 4 {
		t.Errorf("refused with %v", err)
	}
}

// Messages of a split stream are in the partitions of their keys, in order. Streams that are not split are unchanged.
func TestPartitions(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	p := newPublisher(t, client, outboxredis.Config{
		Stream: "orders", Partitions: map[string]int{"orders": 4, "one": 1},
		Routes: map[string]outbox.Route{"audit": {Exchange: "audit"}, "one": {Exchange: "one"}},
	})
	want := map[string][]uuid.UUID{}
	for i := range 120 {
		m := driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "order", Key: fmt.Sprintf("key-%d", i%30)}
		stream := ""
		switch i % 10 {
		case 0:
			m.Name, stream = "audit", "audit"
		case 1:
			m.Name, stream = "one", "one"
		case 2:
			m.Key = ""
			stream = partition.Name("orders", partition.Of("", m.ID.String(), 4))
		default:
			stream = partition.Name("orders", partition.Of(m.Key, "", 4))
		}
		want[stream] = append(want[stream], m.ID)
		must(t, publish(t, p, m))
	}
	if len(want) != 6 {
		t.Fatalf("messages for %d streams, want 6", len(want))
	}
	for stream, messages := range want {
		got, err := received(t.Context(), client, stream)
		if err != nil || len(got) != len(messages) {
			t.Errorf("stream %s has %d messages, want %d; %v", stream, len(got), len(messages), err)
			continue
		}
		for i, m := range got {
			if m.ID != messages[i] {
				t.Errorf("message %d of stream %s is %v, want %v", i, stream, m.ID, messages[i])
			}
		}
	}
	if n := client.DBSize(t.Context()).Val(); int(n) != len(want) {
		t.Errorf("%d streams, want %d", n, len(want))
	}
}

// Check covers each partition, and invalid numbers are rejected.
func TestPartitionsChecked(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	must(t, client.Set(t.Context(), "orders.3", "1", 0).Err())
	for n, want := range map[int]int{0: 0, 3: 0, 4: 1} {
		p := newPublisher(t, client, outboxredis.Config{Partitions: map[string]int{"orders": n}})
		if err := p.Check(t.Context()); fixes(err) != want {
			t.Errorf("%d partitions: %v", n, err)
		}
	}
	_, err := outboxredis.NewPublisher(client, outboxredis.Config{Partitions: map[string]int{"a": 65, "b": -1, "c": 64}})
	if err == nil || !strings.Contains(err.Error(), `of "a": 65`) || !strings.Contains(err.Error(), `of "b": -1`) || strings.Contains(err.Error(), `"c"`) {
		t.Errorf("refused with %v", err)
	}
}

// Entries equal those that a real Symfony Messenger has handled, as `make interop RECORD=1` recorded them.
func TestRecorded(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	for name, form := range map[string]format.Symfony{
		"stock": {Classes: classes}, "stamp": {Classes: classes, IDStamp: `App\Messenger\MessageIdStamp`}, "library": format.Freyr02(),
	} {
		text, err := os.ReadFile(filepath.Join("testdata/recorded", name+".json"))
		must(t, err)
		var want struct {
			Fields map[string]any
			Want   struct{ Body string }
		}
		must(t, json.Unmarshal(text, &want))
		field := func(name string) string { s, _ := want.Fields[name].(string); return s }
		created, err := time.Parse(time.RFC3339Nano, field("created-at"))
		must(t, err)
		p := newPublisher(t, client, outboxredis.Config{Stream: name, Format: form})
		err = publish(t, p, driver.Message{
			ID: uuid.MustParse(field("id")), Name: field("name"), Body: []byte(want.Want.Body), ContentType: field("content-type"),
			Headers: map[string]string{"tenant": "go"}, CreatedAt: created,
		})
		must(t, err)
		if got := client.XRange(t.Context(), name, "-", "+").Val(); len(got) != 1 || !maps.Equal(got[0].Values, want.Fields) {
			t.Errorf("%s: published %v, recorded was %v", name, got, want.Fields)
		}
	}
}

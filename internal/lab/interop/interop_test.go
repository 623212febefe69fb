//go:build interop

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var record = flag.Bool("record", false, "write the messages on the wire into the fixtures of the suites")

// recorder is the command that makes the fixtures.
const recorder = "make interop RECORD=1"

// patience bounds a peer's run.
const patience = 2 * time.Minute

// event is one line of a peer's output.
type event struct {
	Event     string
	Class     string
	OrderID   string `json:"orderId"`
	Total     int
	Retry     int
	Stamp     string
	Name      string
	MessageID string `json:"message_id"`
	Type      string
	Tenant    string
	Error     string
	Key       string
	Content   string `json:"content_type"`
	CreatedAt string `json:"created_at"`
	Written   int64
	Pending   int
	Headers   map[string]any
	Body      string
}

// task is an instruction for a peer, in JSON.
type task map[string]any

// peer runs one of the peers' programs and returns its output.
func peer(t *testing.T, program []string, do task, env ...string) []event {
	t.Helper()
	text, err := json.Marshal(do)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], append(slices.Clone(program[1:]), string(text))...)
	cmd.Dir, cmd.Env = os.Getenv(peersVar), append(os.Environ(), env...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	t.Logf("$ %s %s\n%s%s", filepath.Base(program[0]), program[1], out, complaint.Bytes())
	if err != nil {
		t.Fatalf("%v: %v", program, err)
	}
	var events []event
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
		events = append(events, e)
	}
	if len(events) == 0 || events[len(events)-1].Event != "end" {
		t.Fatal("the peer did not finish")
	}
	return events[:len(events)-1]
}

// php runs Symfony with a task on a broker.
func php(t *testing.T, b broker, do task, env ...string) []event {
	t.Helper()
	for name, value := range b.task() {
		do[name] = value
	}
	return peer(t, []string{"php", "symfony.php"}, do, env...)
}

// of returns the events of one kind for an order.
func of(events []event, kind, order string) (found []event) {
	for _, e := range events {
		if e.Event == kind && e.OrderID == order {
			found = append(found, e)
		}
	}
	return found
}

// broker is RabbitMQ or Redis, with one queue for orders and one for orders that failed in PHP.
type broker interface {
	// kind is the name of its fixtures' folder.
	kind() string
	// task has the address of the broker for a peer.
	task() task
	// publish sends messages to the orders with our publisher.
	publish(t *testing.T, form format.Symfony, msgs ...outboxdriver.Message)
	// consume reads a queue with our consumer until the test ends.
	consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error)
	// dead is the queue with our consumer's dead letters of the orders, of class unrecoverable.
	dead() string
	// tap records all messages that reach a queue from now on. seen returns them.
	tap(t *testing.T, place string) (seen func() []fixture)
	// waiting returns the messages in the queue where PHP reads the orders.
	waiting(t *testing.T) []fixture
}

// fixture is a message in its form on the wire.
type fixture struct {
	About   string `json:"about"`
	Command string `json:"command"`
	// On RabbitMQ: properties by their AMQP names, and headers.
	Properties map[string]any `json:"properties,omitempty"`
	Headers    map[string]any `json:"headers,omitempty"`
	Body       string         `json:"body,omitempty"`
	// On Redis: the fields of an entry.
	Fields map[string]any `json:"fields,omitempty"`
	// Want is the message that our consumer must make of it.
	Want want `json:"want"`
}

// first waits for the first message in a queue.
func first(t *testing.T, seen func() []fixture) fixture { t.Helper(); return some(t, seen)[0] }

// last is first for the last message.
func last(t *testing.T, seen func() []fixture) fixture {
	t.Helper()
	all := some(t, seen)
	return all[len(all)-1]
}

func some(t *testing.T, seen func() []fixture) (all []fixture) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if all = seen(); len(all) == 0 {
			return errors.New("no message has arrived")
		}
		return nil
	})
	return all
}

// want is the message that a consumer makes of a fixture.
type want struct {
	ID          uuid.UUID `json:"id"`
	Name        string    `json:"name"`
	Body        string    `json:"body"`
	ContentType string    `json:"content_type"`
}

// keep writes a fixture for the suite of a consumer or a publisher, if -record is set.
func (f fixture) keep(t *testing.T, b broker, side, name, about string, w want) {
	t.Helper()
	f.About, f.Command, f.Want = about, recorder, w
	text, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if !*record {
		return
	}
	path := filepath.Join("../../..", side, side+b.kind(), "testdata/recorded", name+".json")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// classes are the message classes of the application.
var classes = map[string]string{"order.placed": `App\Message\OrderPlaced`}

// The stamps of the application and of the library.
const (
	appStamp     = `App\Messenger\MessageIdStamp`
	libraryStamp = `Freyr\MessageBroker\Inbox\MessageIdStamp`
)

func stamped() format.Symfony { return format.Symfony{Classes: classes, IDStamp: appStamp} }

func order(id string) outboxdriver.Message {
	return outboxdriver.Message{
		ID: ids.New(), Name: "order.placed", Body: []byte(`{"orderId":"` + id + `","total":4200}`), ContentType: "application/json",
		Headers: map[string]string{"tenant": "go"}, CreatedAt: time.Now(),
	}
}

// received is a channel of handled messages.
type received chan *inbox.Message

func (r received) handle(m *inbox.Message) error { r <- m; return nil }

func (r received) next(t *testing.T) *inbox.Message {
	t.Helper()
	select {
	case m := <-r:
		t.Logf("Go received %s %s attempt %d: %s", m.Name, m.ID, m.Attempt, m.Body)
		return m
	case <-time.After(patience):
		t.Fatal("no message arrived")
		return nil
	}
}

// languages are the peers in other languages than PHP. Python is Debian's.
var languages = map[string][]string{"python": {"/usr/bin/python3", "python.py"}, "node": {"node", "node.js"}}

// inEach runs a test for each language.
func inEach(t *testing.T, run func(t *testing.T, name string, program []string)) {
	for name, program := range languages {
		t.Run(name, func(t *testing.T) { run(t, name, program) })
	}
}

// Our consumer handles messages that others send according to examples/guides/wire.md, also messages
// with a key from the partition of its slot.
func TestLanguagesToGo(t *testing.T) {
	inEach(t, func(t *testing.T, name string, program []string) {
		b := newRabbit(t)
		got := make(received, 100)
		cfg := consumerConfig()
		cfg.Ordered = true
		c, err := inboxamqp.NewConsumer(b.Dial, inboxamqp.Queue{Name: "partitioned", Bindings: []inboxamqp.Binding{{Exchange: "orders", Key: "order.*"}}, Classic: true, Partitions: 4}, processor(got.handle), cfg)
		if err != nil {
			t.Fatal(err)
		}
		start(t, c)
		var messages []task
		for _, key := range []string{"", "customer-1", "customer-2", "Kunde Ü", "customer-4"} {
			m := task{"orderId": "A-" + key, "total": 4200}
			if key != "" {
				m["key"] = key
			}
			messages = append(messages, m)
		}
		plain := make(received, 100)
		b.consume(t, "orders", format.Symfony{}, plain.handle)
		events := peer(t, program, task{"action": "send", "dsn": b.URL, "messages": messages})
		sent := map[string]event{}
		for _, e := range events {
			sent[e.MessageID] = e
		}
		check := func(m *inbox.Message) {
			e, known := sent[m.ID.String()]
			if !known || m.Name != "order.placed" || m.ContentType != "application/json" || m.Headers["tenant"] != name || m.Headers["number"] != "7" ||
				m.Key != strings.TrimPrefix(e.OrderID, "A-") || !strings.Contains(string(m.Body), `"total":`) {
				t.Errorf("received %+v of %+v", m, e)
			}
		}
		for range messages {
			check(plain.next(t))
		}
		for range messages { // each once, because it is in one partition
			check(got.next(t))
		}
		if len(got) > 0 {
			t.Errorf("%d too many", len(got))
		}
	})
}

// Other languages read messages of our publisher.
func TestGoToLanguages(t *testing.T) {
	inEach(t, func(t *testing.T, name string, program []string) {
		b := newRabbit(t)
		light, full := order("A-1"), order("A-2")
		light.Headers = nil
		full.Key, full.ContentType, full.CreatedAt = "customer-7", "application/vnd.shop+json", time.Unix(1_700_000_000, 0)
		b.publish(t, format.Symfony{}, light, full)
		events := peer(t, program, task{"action": "receive", "dsn": b.URL, "from": "orders.php", "limit": 2})
		if len(events) != 2 {
			t.Fatalf("received %+v", events)
		}
		check := func(e event, m outboxdriver.Message, written int64) {
			if e.MessageID != m.ID.String() || e.Type != m.Name || e.Body != string(m.Body) || e.Content != m.ContentType || e.Written != written {
				t.Errorf("received %+v of %+v", e, m)
			}
		}
		check(events[0], light, ids.Time(light.ID).Unix())
		check(events[1], full, full.CreatedAt.Unix())
		if h := events[1].Headers; h["tenant"] != "go" || h["holdfast-key"] != full.Key {
			t.Errorf("headers %v", h)
		}
	})
}

// On Redis Streams, Python adds entries by hand: with the minimum of fields in wire.md, and with all
// fields that a sender may set. It also reads messages of our publisher.
func TestStreamsWithPython(t *testing.T) {
	b := newRedis(t)
	program := languages["python"]
	options := b.client.Options()
	url := fmt.Sprintf("redis://%s/%d", options.Addr, options.DB)
	got := make(received, 10)
	b.consume(t, "orders", format.Symfony{}, got.handle)
	events := peer(t, program, task{"action": "send", "redis": url, "stream": "orders", "messages": []task{
		{"orderId": "A-1", "total": 4200}, {"orderId": "A-2", "total": 4200, "key": "Kunde Ü"},
	}})
	for i, wants := range []struct{ key, tenant, content string }{{}, {"Kunde Ü", "python", "application/json"}} {
		m := got.next(t)
		if m.ID.String() != events[i].MessageID || m.Name != "order.placed" || m.ContentType != wants.content || m.Key != wants.key ||
			m.Headers["tenant"] != wants.tenant || !strings.Contains(string(m.Body), events[i].OrderID) {
			t.Errorf("received %+v of %+v", m, events[i])
		}
	}

	m := order("A-3")
	m.Key = "customer-7"
	other := newRedis(t)
	other.publish(t, format.Symfony{}, m)
	options = other.client.Options()
	events = peer(t, program, task{"action": "receive", "redis": fmt.Sprintf("redis://%s/%d", options.Addr, options.DB), "stream": "orders"})
	if len(events) != 2 || events[1].Pending != 0 {
		t.Fatalf("received %+v", events)
	}
	e := events[0]
	if _, err := time.Parse(time.RFC3339, e.CreatedAt); err != nil {
		t.Error(err)
	}
	if e.MessageID != m.ID.String() || e.Type != m.Name || e.Key != m.Key || e.Content != m.ContentType || e.Body != string(m.Body) || e.Headers["tenant"] != "go" {
		t.Errorf("received %+v", e)
	}
}

// Other languages write into the outbox with the function of the schema. A relay of ours publishes these
// messages, and other languages read them. The function rejects invalid messages.
func TestLanguagesWrite(t *testing.T) {
	inEach(t, func(t *testing.T, name string, program []string) {
		b := newRabbit(t)
		pool, schema := pgtest.NewSchema(t)
		store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		written := peer(t, program, task{"action": "write", "postgres": testenv.PostgresURL(t), "schema": schema, "messages": []task{
			{"name": "order.placed", "orderId": "A-1", "key": "Kunde Ü"}, {"name": "Order.Placed", "orderId": "A-2"}, {"name": "order.placed", "orderId": "A-3"},
		}})
		if len(of(written, "written", "A-1"))+len(of(written, "written", "A-3")) != 2 {
			t.Fatalf("written %+v", written)
		}
		if refused := of(written, "refused", "A-2"); len(refused) != 1 || !strings.HasPrefix(refused[0].Error, "22023 outbox: Name") {
			t.Errorf("refused %+v", refused)
		}
		publisher, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "orders"})
		if err != nil {
			t.Fatal(err)
		}
		relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if report, err := relay.Drain(t.Context(), outbox.Bounds{}); err != nil || report.Published != 2 {
			t.Fatalf("published %+v, %v", report, err)
		}
		ids := map[string]event{}
		for _, e := range peer(t, program, task{"action": "receive", "dsn": b.URL, "from": "orders.php", "limit": 2}) {
			ids[e.MessageID] = e
		}
		for _, e := range written {
			if got, ok := ids[e.MessageID]; e.Event == "written" && (!ok || got.Type != "order.placed" || got.Headers["tenant"] != name || !strings.Contains(got.Body, e.OrderID)) {
				t.Errorf("of %+v came %+v", e, got)
			}
		}
	})
}

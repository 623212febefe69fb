//go:build interop

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var record = flag.Bool("record", false, "write what was seen into the fixtures of the suites")

// recorder makes the fixtures.
const recorder = "make interop RECORD=1"

// patience bounds a peer's run.
const patience = 2 * time.Minute

// event is one line of a peer's output: what happened.
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

// task is what a peer is told to do, in JSON.
type task map[string]any

// peer runs a program of peers and returns what it tells.
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
		t.Fatal("the peer did not come to its end")
	}
	return events[:len(events)-1]
}

// php has Symfony do something on a broker.
func php(t *testing.T, b broker, do task, env ...string) []event {
	t.Helper()
	for name, value := range b.task() {
		do[name] = value
	}
	return peer(t, []string{"php", "symfony.php"}, do, env...)
}

// of are the events of one order of a kind.
func of(events []event, kind, order string) (found []event) {
	for _, e := range events {
		if e.Event == kind && e.OrderID == order {
			found = append(found, e)
		}
	}
	return found
}

// broker is RabbitMQ or Redis, with one place for orders and one for those that failed in PHP.
type broker interface {
	// kind is the name of its fixtures' folder.
	kind() string
	// task tells a peer where it is.
	task() task
	// publish has our publisher send messages to the orders.
	publish(t *testing.T, form format.Symfony, msgs ...outbox.Message)
	// consume has our consumer read a place until the test ends.
	consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error)
	// dead is where our consumer's dead letters of the orders are, of class unrecoverable.
	dead() string
	// tap remembers all that comes to a place from now on, and returns what has.
	tap(t *testing.T, place string) (seen func() []fixture)
	// waiting is what lies where PHP reads the orders.
	waiting(t *testing.T) []fixture
}

// fixture is a message as it is on the wire.
type fixture struct {
	About   string `json:"about"`
	Command string `json:"command"`
	// Of RabbitMQ: properties by their names in AMQP, and headers.
	Properties map[string]any `json:"properties,omitempty"`
	Headers    map[string]any `json:"headers,omitempty"`
	Body       string         `json:"body,omitempty"`
	// Of Redis: the fields of an entry.
	Fields map[string]any `json:"fields,omitempty"`
	// What it is to us.
	Want want `json:"want"`
}

// first waits for the first of what comes to a place.
func first(t *testing.T, seen func() []fixture) fixture { t.Helper(); return some(t, seen)[0] }

// last is first for the last.
func last(t *testing.T, seen func() []fixture) fixture {
	t.Helper()
	all := some(t, seen)
	return all[len(all)-1]
}

func some(t *testing.T, seen func() []fixture) (all []fixture) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if all = seen(); len(all) == 0 {
			return errors.New("nothing is there")
		}
		return nil
	})
	return all
}

// want is what a consumer makes of a fixture.
type want struct {
	ID          uuid.UUID `json:"id"`
	Name        string    `json:"name"`
	Body        string    `json:"body"`
	ContentType string    `json:"content_type"`
}

// keep writes a fixture for the suite of a consumer, or of a publisher, where that is asked for.
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

// classes are those of the application.
var classes = map[string]string{"order.placed": `App\Message\OrderPlaced`}

// The stamps of the application, and of the library.
const (
	appStamp     = `App\Messenger\MessageIdStamp`
	libraryStamp = `Freyr\MessageBroker\Inbox\MessageIdStamp`
)

func stamped() format.Symfony { return format.Symfony{Classes: classes, IDStamp: appStamp} }

func order(id string) outbox.Message {
	return outbox.Message{
		ID: ids.New(), Name: "order.placed", Body: []byte(`{"orderId":"` + id + `","total":4200}`), ContentType: "application/json",
		Headers: map[string]string{"tenant": "go"}, CreatedAt: time.Now(),
	}
}

// received waits for messages at a handler.
type received chan *inbox.Message

func (r received) handle(m *inbox.Message) error { r <- m; return nil }

func (r received) next(t *testing.T) *inbox.Message {
	t.Helper()
	select {
	case m := <-r:
		t.Logf("Go received %s %s attempt %d: %s", m.Name, m.ID, m.Attempt, m.Body)
		return m
	case <-time.After(patience):
		t.Fatal("nothing comes")
		return nil
	}
}

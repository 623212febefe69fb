package operator_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// events returns the events of a message as "part what", in order.
func (r *rig) events(t *testing.T, id uuid.UUID) (events []string, all string) {
	t.Helper()
	all = r.wants(t, 0, []string{"show", id.String(), "--json"})
	var story struct{ Events []struct{ Part, What string } }
	check(t, json.Unmarshal([]byte(all), &story))
	for _, e := range story.Events {
		events = append(events, strings.TrimSpace(e.Part+" "+e.What))
	}
	return events, all
}

func (r *rig) wantStory(t *testing.T, id uuid.UUID, want ...string) (all string) {
	t.Helper()
	got, all := r.events(t, id)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the story is %q, want %q: %s", got, want, all)
	}
	return all
}

// newStoryRig returns a service whose outbox sends through the broker to a consumer with an inbox. The handler fails until fixed
// is set.
func newStoryRig(t *testing.T) (r *rig, store *outboxtest.Store) {
	t.Helper()
	r = newRig(t)
	manager := txretrytest.New(txretrytest.Config{})
	store, broker := outboxtest.New(), inboxtest.NewBroker()
	entries := must(inboxtest.New(manager, "ledger", inboxpgx.Config{}))(t)
	check(t, inboxpgx.Handle(entries, "order.placed", func(context.Context, pgx.Tx, *map[string]string) error {
		if r.fixed {
			return nil
		}
		return inbox.Unrecoverable(errors.New("no such currency"))
	}))
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "ledger"}, entries, inbox.ConsumerConfig{Logger: quiet}))(t)
	r.relay = must(outbox.NewRelay(store, broker, outbox.RelayConfig{Logger: quiet}))(t)
	r.take = func(t *testing.T) {
		t.Helper()
		_, err := r.relay.Drain(t.Context(), outbox.Bounds{})
		check(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- consumer.Run(ctx) }()
		check(t, broker.Idle(t.Context()))
		stop()
		check(t, <-ended)
	}
	r.write = func(name string, notBefore time.Time) {
		t.Helper()
		m := must(outbox.NewMessage(name, map[string]string{"secret": name}))(t)
		m.NotBefore, m.Headers = notBefore, map[string]string{"traceparent": "00-" + trace + "-00f067aa0ba902b7-01"}
		r.ids[name] = m.ID
		check(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
	}
	r.cfg.Outboxes = []operator.Outbox{{Store: store, Relay: r.relay}}
	r.cfg.Consumers = []operator.Consumer{{Name: "ledger", Consumer: consumer, Inbox: entries}}
	r.cfg.TraceURL = "https://tempo.example/trace/{trace_id}?q=1"
	return r, store
}

const trace = "4bf92f3577b34da6a3ce929d0e0e4736"

// The story of a message from the outbox to its effect, after a failure and a retry.
func TestStory(t *testing.T) {
	t.Parallel()
	r, _ := newStoryRig(t)
	r.write("order.placed", time.Time{})
	id := r.ids["order.placed"]
	r.wantStory(t, id, "outbox written", "outbox waits for a relay")

	r.take(t)
	all := r.wantStory(t, id, "id created", "ledger sent", "ledger dead letter")
	for _, part := range []string{"no such currency", `"trace_url": "https://tempo.example/trace/` + trace + `?q=1"`, "outbox: no row waits. It was published and deleted at once, or never written here"} {
		if !strings.Contains(all, part) {
			t.Errorf("the story lacks %q: %s", part, all)
		}
	}
	r.wants(t, 0, []string{"show", id.String()}, "ledger  dead letter", "1 attempt failed, unrecoverable: ", `body:`, "trace: https://tempo.example/trace/"+trace)

	r.fixed = true
	r.wants(t, 0, []string{"retry", id.String(), "--by=ada", "--reason=currency added"}, "ledger: 1 retried")
	r.take(t)
	all = r.wantStory(t, id, "id created", "ledger retry", "ledger processed")
	if !strings.Contains(all, "by ada: currency added") {
		t.Errorf("the story lacks the author: %s", all)
	}
	if log := r.wants(t, 0, []string{"log"}, "currency added"); strings.Count(log, "retry") != 1 {
		t.Errorf("one change has several lines: %s", log)
	}
}

// An action that chose many dead letters may have included the message. Later actions did not.
func TestStory_actionsOnMany(t *testing.T) {
	t.Parallel()
	r, _ := newStoryRig(t)
	r.write("order.placed", time.Time{})
	id := r.ids["order.placed"]
	r.take(t)
	r.fixed = true
	r.wants(t, 0, []string{"retry", "--class=unrecoverable", "--by=ada"}, "ledger: 1 retried")
	r.take(t)
	if all := r.wantStory(t, id, "id created", "ledger retry", "ledger processed"); !strings.Contains(all, `(may have included it: --class=\"unrecoverable\")`) {
		t.Errorf("the story does not limit its claim: %s", all)
	}
}

// A message for later shows when it is due.
func TestStory_later(t *testing.T) {
	t.Parallel()
	r, store := newStoryRig(t)
	r.write("order.placed", time.Now().Add(time.Hour))
	r.wantStory(t, r.ids["order.placed"], "outbox written", "outbox next attempt")
	r.wants(t, 0, []string{"show", r.ids["order.placed"].String()}, "in 59 min")

	publisher := outboxtest.NewPublisher()
	publisher.Respond(func(driver.Message) error { return errors.New("no route") })
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: quiet, Retry: outbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}}))(t)
	r.write("fails", time.Time{})
	_, err := relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)
	if all := r.wantStory(t, r.ids["fails"], "outbox written", "outbox 1 attempt failed", "outbox next attempt"); !strings.Contains(all, "no route") {
		t.Errorf("the story lacks the error: %s", all)
	}
}

// An id that no part knows is answered with how long it would be known.
func TestStory_unknown(t *testing.T) {
	t.Parallel()
	r, _ := newStoryRig(t)
	id := uuid.NewString()
	code, out, errs := r.run(t, "show", id)
	if code != 1 || !strings.Contains(errs, "no part knows message "+id) || !strings.Contains(errs, "see the log") {
		t.Errorf("exits with %d: %q", code, errs)
	}
	for _, part := range []string{"outbox: no row waits", "ledger: no entry. It was not processed here, or more than 8 days ago"} {
		if !strings.Contains(out, part) {
			t.Errorf("the answer lacks %q: %s", part, out)
		}
	}
	s := serve(t, r, page.Config{})
	s.get(t, "message?id="+id, 200, "No part knows this message", "more than 8 days ago")
	a := newAgent(t, agents.Config{})
	a.refuses(t, "explain", map[string]any{"id": id}, "no part knows message")
}

// broken is a consumer whose dead letters cannot be read.
type broken struct{ inbox.DeadLetters }

func (broken) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) {
	return nil, errors.New("broker is down")
}

type brokenConsumer struct{}

func (brokenConsumer) DeadLetters() inbox.DeadLetters { return broken{} }

// A failed part is named, and the other parts are shown.
func TestStory_partFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "mail", Consumer: brokenConsumer{}})
	id := r.ids["a"].String()
	if out := r.wants(t, 1, []string{"show", id}, "dead letter", "no exchange a"); strings.Count(out, "written") != 1 {
		t.Errorf("it is written %d times: %s", strings.Count(out, "written"), out)
	}
	s := serve(t, r, page.Config{})
	s.get(t, "message?id="+id, 200, "dead letter", "no exchange a", "mail: broker is down")
}

// A message that waits behind a dead letter of its key names the dead letter, which names the message.
func TestStory_stoppedKey(t *testing.T) {
	t.Parallel()
	p := newDatabase(t).role(t, "consume")
	check(t, inboxpgx.Handle(p.inbox, "order.paid", func(context.Context, pgx.Tx, map[string]string) error {
		return inbox.Unrecoverable(errors.New("no such order"))
	}))
	letters, send, stop := p.consume(t)
	first, second := must(uuid.NewV7())(t), must(uuid.NewV7())(t)
	send(first, "one key")
	send(second, "one key")
	stop()
	r := &rig{cfg: operator.Config{Consumers: []operator.Consumer{{Name: "billing", Consumer: fixedLetters{letters}, Inbox: p.inbox}}}}
	s := serve(t, r, page.Config{})
	s.get(t, "dead-letter?from=billing&id=billing/"+first.String(), 200, "1 message of its key waits behind it", "order.paid", `href="message?id=`+second.String(), "as the dead letter that stops its key")
	s.get(t, "message?id="+second.String(), 200, "its key is stopped by the dead letter "+first.String())
	a := newAgent(t, agents.Config{}, func(c *operator.Config) { *c = r.cfg })
	a.answers(t, "explain", map[string]any{"id": first.String()}, `"parked_behind":1`, `"waiting_behind":[{"from":"billing","id":"`+second.String())
	must(letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "ada"}))(t)
	r.wants(t, 0, []string{"show", second.String()}, "the messages of its key run, one after the other")
}

// fixedLetters is a consumer that only has dead letters.
type fixedLetters struct{ letters inbox.DeadLetters }

func (f fixedLetters) DeadLetters() inbox.DeadLetters { return f.letters }

// The page shows a story with a link to its trace, and without a script or a right to see bodies.
func TestPage_story(t *testing.T) {
	t.Parallel()
	r, _ := newStoryRig(t)
	r.write("order.placed", time.Time{})
	r.take(t)
	s := serve(t, r, page.Config{})
	id := r.ids["order.placed"].String()
	s.get(t, "dead-letters", 200, `href="message"`)
	s.get(t, "message", 200, `class="empty"`, "holdfast show ID")
	s.get(t, "message?id=x", 400, `"x" is not an id`)
	link := `href="https://tempo.example/trace/` + trace + `?q=1"`
	for _, address := range []string{"message?id=%20" + id, "dead-letter?from=ledger&id=ledger/" + id} {
		body := html.UnescapeString(s.get(t, address, 200, "no such currency", "dead letter", " ago</time>", link))
		if strings.Contains(body, "secret") || strings.Contains(body, "traceparent") {
			t.Errorf("%s shows the body or headers: %s", address, body)
		}
	}
}

func TestConfig_traceURL(t *testing.T) {
	t.Parallel()
	for template, valid := range map[string]bool{
		"": true, "https://tempo/trace/{trace_id}": true, "http://jaeger:16686/trace/{trace_id}?x=1": true,
		"https://tempo/trace": false, "javascript:alert('{trace_id}')": false, "/trace/{trace_id}": false,
	} {
		if _, err := page.New(operator.Config{TraceURL: template}, page.Config{}); (err == nil) != valid {
			t.Errorf("%q: %v", template, err)
		}
	}
}

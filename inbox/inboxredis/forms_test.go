package inboxredis_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// phpEntry is an entry in the form of Symfony's transport. php means that PHP's client serializes it.
func phpEntry(t *testing.T, body string, headers any, php bool) map[string]any {
	t.Helper()
	text, err := json.Marshal(map[string]any{"body": body, "headers": headers})
	noError(t, err)
	if php {
		text = fmt.Appendf(nil, `s:%d:"%s";`, len(text), text)
	}
	return map[string]any{"message": string(text)}
}

func TestForms(t *testing.T) {
	t.Parallel()
	id := uuid.MustParse("0190a2c4-7c1e-7a39-8d47-1f0a7e9b6c11")
	stamp := `[{"messageId":"` + id.String() + `"}]`
	headers := map[string]string{
		"type": `App\Order\Placed`, "Content-Type": "application/json", `X-Message-Stamp-App\Messenger\MessageIdStamp`: stamp, "X-Empty": "",
	}
	body := `{"order":"ü\"s:1:"}`
	ofSymfony := inbox.Message{ID: id, Name: `App\Order\Placed`, Body: []byte(body), ContentType: "application/json", Headers: headers}
	direct := map[string]any{"body": body, "headers": must(json.Marshal(headers))}
	long := strings.Repeat("x", 2<<20)
	for name, tt := range map[string]struct {
		fields map[string]any
		want   inbox.Message
	}{
		"Symfony":                  {phpEntry(t, body, headers, false), ofSymfony},
		"Symfony, serialized":      {phpEntry(t, body, headers, true), ofSymfony},
		"Symfony, no headers":      {phpEntry(t, body, []string{}, true), inbox.Message{Body: []byte(body)}},
		"direct fields":            {direct, ofSymfony},
		"event of another version": {map[string]any{"id": id.String(), "name": "n", "content-type": "application/cloudevents+json", "body": `{"specversion":"0.3"}`}, inbox.Message{ID: id, Body: []byte(`{"specversion":"0.3"}`), ContentType: "application/cloudevents+json"}},
		"stamp without namespace":  {map[string]any{"headers": `{"X-Message-Stamp-MessageIdStamp":` + string(must(json.Marshal(stamp))) + `}`, "name": "a"}, inbox.Message{ID: id, Name: "a", Headers: map[string]string{"X-Message-Stamp-MessageIdStamp": stamp}}},
		"ours, a field before":     {map[string]any{"id": id.String(), "name": "a", "body": "b", "key": "k", "headers": `{"type":"other"}`}, inbox.Message{ID: id, Name: "a", Body: []byte("b"), Key: "k", Headers: map[string]string{"type": "other"}}},
		"a time":                   {map[string]any{"created-at": "2026-01-02T03:04:05.000006Z"}, inbox.Message{PublishedAt: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)}},
		"no JSON":                  {map[string]any{"message": "{", "body": "b"}, inbox.Message{}},
		"wrong length":             {map[string]any{"message": `s:3:"{"body":"b"}";`}, inbox.Message{}},
		"headers that are no JSON": {map[string]any{"headers": "{", "body": "b"}, inbox.Message{Body: []byte("b")}},
		"headers of other types":   {map[string]any{"headers": `{"n":1,"s":"x","o":{}}`}, inbox.Message{Headers: map[string]string{"s": "x"}}},
		"too many headers":         {map[string]any{"headers": `{"s":"` + long + `"}`, "body": "b"}, inbox.Message{Body: []byte("b")}},
		"no uuid":                  {map[string]any{"id": "{" + id.String() + "}", "name": "a"}, inbox.Message{Name: "a"}},
		"something else":           {map[string]any{"temperature": "21"}, inbox.Message{}},
		"counts that are none":     {map[string]any{"holdfast-attempt": "-7", "holdfast-replays": "99999999999", "holdfast-recovered": "x"}, inbox.Message{Replays: 0}},
		"dead letter moved back":   {map[string]any{"holdfast-failure-class": "default", "holdfast-attempt": "5", "holdfast-replays": "1"}, inbox.Message{Replays: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, false)
			add(t, f.direct, tt.fields)
			source, _ := f.open(t, f.direct, groupName)
			got := *receive(t, open(t, source, 1), 1)[0].Message()
			if got.Queue != stream || got.Attempt != 1 {
				t.Errorf("queue %q, attempt %d", got.Queue, got.Attempt)
			}
			want := tt.want
			if want.PublishedAt.IsZero() && want.ID != uuid.Nil {
				want.PublishedAt = ids.Time(want.ID)
			}
			if got.ID != want.ID || got.Name != want.Name || string(got.Body) != string(want.Body) || got.ContentType != want.ContentType ||
				got.Key != want.Key || !maps.Equal(got.Headers, want.Headers) || !got.PublishedAt.Equal(want.PublishedAt) || name != "counts that are none" && got.Replays != want.Replays {
				t.Errorf("message %+v, want %+v", got, want)
			}
		})
	}
}

// An entry of outboxredis for Symfony is one field to PHP. Our inbox must read it, also after PHP sends it again
// without our fields.
func TestSymfonyFormat(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	form := format.Symfony{Classes: map[string]string{"order.placed": `App\OrderPlaced`}, IDStamp: `App\Uid`}
	p := must(outboxredis.NewPublisher(f.direct, outboxredis.Config{Stream: stream, Format: form}))
	m := outbox.Message{
		ID: ids.New(), Name: "order.placed", Body: []byte(`{"order":"ü<"}`), ContentType: "application/json", Key: "k",
		Headers: map[string]string{"tenant": "a", `X-Message-Stamp-App\Bus`: "[]"}, CreatedAt: time.Unix(1_700_000_000, 0),
	}
	done := make(chan error, 2)
	p.Publish(t.Context(), m, func(err error) { done <- err })
	noError(t, <-done)
	sent := f.direct.XRange(t.Context(), stream, "-", "+").Val()[0].Values
	var parts struct {
		Body    string
		Headers map[string]string
	}
	noError(t, json.Unmarshal([]byte(sent["message"].(string)), &parts))
	want := map[string]string{
		"type": `App\OrderPlaced`, `X-Message-Stamp-App\Uid`: `[{"messageId":"` + m.ID.String() + `"}]`, "tenant": "a", `X-Message-Stamp-App\Bus`: "[]",
	}
	if parts.Body != string(m.Body) || !maps.Equal(parts.Headers, want) || sent["body"] != nil || sent["headers"] != nil {
		t.Errorf("sent %+v", sent)
	}
	add(t, f.direct, map[string]any{"message": sent["message"]})
	source := running(t, newSource(t, f.direct, inboxredis.Config{Format: form}))
	for i, d := range receive(t, open(t, source, 2), 2) {
		got := d.Message()
		if got.ID != m.ID || got.Name != m.Name || string(got.Body) != string(m.Body) || got.Headers["tenant"] != "a" {
			t.Errorf("message %d: %+v", i, got)
		}
		if own := i == 0; own != (got.Key == m.Key) || own != got.PublishedAt.Equal(m.CreatedAt) {
			t.Errorf("message %d: %+v", i, got)
		}
	}
	m.ID, m.Body = ids.New(), []byte{0xff}
	p.Publish(t.Context(), m, func(err error) { done <- err })
	if err := <-done; outbox.ClassOf(err) != outbox.Permanent {
		t.Errorf("a body that is no UTF-8: %v", err)
	}
}

// Our inbox must read events in both modes without any setting, with our own fields and without.
func TestCloudEvents(t *testing.T) {
	t.Parallel()
	for _, structured := range []bool{false, true} {
		f := newFixture(t, false)
		form := format.CloudEvents{Source: "/shop", Structured: structured}
		p := must(outboxredis.NewPublisher(f.direct, outboxredis.Config{Stream: stream, Format: form}))
		m := outbox.Message{
			ID: ids.New(), Name: "order.placed", Body: []byte(`{"cents": 4200}`), ContentType: "application/json", Key: "A-1",
			Headers: map[string]string{"cloudEvents:subject": "orders/1"}, CreatedAt: time.Unix(1_700_000_000, 0),
		}
		done := make(chan error, 1)
		p.Publish(t.Context(), m, func(err error) { done <- err })
		noError(t, <-done)
		sent := f.direct.XRange(t.Context(), stream, "-", "+").Val()[0].Values
		if structured != (sent["content-type"] == "application/cloudevents+json; charset=utf-8") || structured == (sent["ce_source"] == "/shop") || sent["name"] != m.Name {
			t.Errorf("structured %v: sent %v", structured, sent)
		}
		theirs := map[string]any{"content-type": sent["content-type"], "body": sent["body"]}
		for name, value := range sent {
			if strings.HasPrefix(name, "ce_") {
				theirs[name] = value
			}
		}
		add(t, f.direct, theirs)
		for i, d := range receive(t, open(t, running(t, newSource(t, f.direct, inboxredis.Config{})), 2), 2) {
			got := d.Message()
			if got.ID != m.ID || got.Name != m.Name || got.Key != m.Key || string(got.Body) != string(m.Body) || got.ContentType != m.ContentType ||
				!got.PublishedAt.Equal(m.CreatedAt) || got.Headers["cloudEvents:subject"] != "orders/1" || got.Headers["cloudEvents:source"] != "/shop" {
				t.Errorf("structured %v, message %d: %+v", structured, i, got)
			}
		}
	}
}

// Entries that take long to decode are received as usual, and are reported as slow.
func TestForms_largeOnesAreSlow(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	text := `"` + strings.Repeat("x", 100_000) + `"`
	event := `{"specversion":"1.0","id":"1","source":"/s","type":"large","data":` + text + `}`
	for _, fields := range []map[string]any{
		phpEntry(t, text, map[string]string{"type": "large"}, true),
		{"name": "large", "content-type": "application/cloudevents+json", "body": event},
		{"name": "large", "body": text, "headers": `{"a":` + text + `}`},
		{"name": "plain", "body": text},
		{"name": "plain", "body": `{}`},
	} {
		add(t, f.direct, fields)
	}
	for _, d := range receive(t, open(t, running(t, newSource(t, f.direct, inboxredis.Config{})), 5), 5) {
		slow := d.(driver.SlowDelivery).Slow()
		if m := d.Message(); slow != (m.Name == "large") || slow && string(m.Body) != text {
			t.Errorf("slow %v: %.200v", slow, m)
		}
	}
}

// Our inbox must read messages that a real Symfony sent, retried or gave up, recorded by `make interop RECORD=1`.
func TestRecorded(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	form := format.Symfony{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}, IDStamp: `App\Messenger\MessageIdStamp`}
	paths := must(filepath.Glob("testdata/recorded/*.json"))
	if len(paths) < 5 {
		t.Fatalf("fixtures %v", paths)
	}
	session := open(t, running(t, newSource(t, f.direct, inboxredis.Config{Format: form})), len(paths))
	for _, path := range paths {
		var r struct {
			About  string
			Fields map[string]any
			Want   struct {
				ID          uuid.UUID
				Name, Body  string
				ContentType string `json:"content_type"`
			}
		}
		if err := json.Unmarshal(must(os.ReadFile(path)), &r); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		add(t, f.direct, r.Fields)
		m := receive(t, session, 1)[0].Message()
		if m.ID != r.Want.ID || m.Name != r.Want.Name || string(m.Body) != r.Want.Body || m.ContentType != r.Want.ContentType {
			t.Errorf("%s: %s: received %+v", path, r.About, m)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func add(t *testing.T, client redis.UniversalClient, fields map[string]any) {
	t.Helper()
	noError(t, client.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
}

// An entry that is unreadable, or has more fields than a script can take, becomes a dead letter with all its
// fields. An entry rejected only by its handler is delivered again unchanged.
func TestUnreadableEntry_keepsAllFields(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	many := map[string]any{"\xff\x00": "\xfe\x01"}
	for i := range 5000 {
		many[fmt.Sprint("field ", i)] = strings.Repeat("v", i%7)
	}
	m := &inbox.Message{ID: ids.New(), Name: "order.placed", Body: []byte(`{"n":1}`)}
	wide := maps.Clone(many)
	maps.Copy(wide, map[string]any{"id": m.ID.String(), "name": m.Name, "body": string(m.Body)})
	fields := []map[string]any{{"temperature": "21\x00\xff"}, many, {"message": "{"}, wide}
	for _, of := range fields {
		add(t, f.direct, of)
	}
	for range 500 {
		publish(t, f.direct, event())
	}
	done, fixed := make(chan *inbox.Message, 1000), make(chan struct{})
	mux := inbox.NewMux()
	handle(t, mux, event().Name, func(ctx context.Context) error { return nil })
	handle(t, mux, m.Name, func(ctx context.Context) error {
		select {
		case <-fixed:
			m, _ := inbox.FromContext(ctx)
			done <- m
			return nil
		default:
			return inbox.Unrecoverable(errors.New("broken"))
		}
	})
	c := newConsumer(t, f.direct, mux, inboxredis.Config{Group: groupName})
	stop := start(t, c)
	defer stop()
	testenv.Eventually(t, func() error {
		letters, err := c.DeadLetters().List(t.Context(), inbox.Filter{Whole: true})
		if err == nil && len(letters) != 4 {
			err = fmt.Errorf("%d of 4 dead letters", len(letters))
		}
		return err
	})
	dead := f.direct.XRange(t.Context(), "{"+stream+"}:"+groupName+":failed."+driver.ClassValidation, "-", "+").Val()
	has := func(field string, value any) bool { // in any order
		return slices.ContainsFunc(dead, func(m redis.XMessage) bool { return m.Values[field] == value })
	}
	if len(dead) != 3 || !has("temperature", fields[0]["temperature"]) || !has("message", "{") {
		t.Errorf("dead letters of class validation: %.500q", fmt.Sprint(dead))
	}
	close(fixed)
	if _, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{Class: driver.ClassUnrecoverable}, inbox.Replay{By: "test"}); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-done:
		if got.ID != m.ID || string(got.Body) != string(m.Body) || got.Replays != 1 || got.Attempt != 1 {
			t.Errorf("replayed %+v", got)
		}
	case <-time.After(testenv.Patience):
		t.Fatal("the replayed message does not come")
	}
	// All fields are there after another failure.
	if _, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{Class: driver.ClassValidation}, inbox.Replay{By: "test", Force: true}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error {
		n, err := c.DeadLetters().Count(t.Context(), inbox.Filter{Class: driver.ClassValidation})
		if err == nil && n != 3 {
			err = fmt.Errorf("%d of 3 dead letters", n)
		}
		return err
	})
	for _, again := range f.direct.XRange(t.Context(), "{"+stream+"}:"+groupName+":failed."+driver.ClassValidation, "-", "+").Val() {
		packed, _ := again.Values["holdfast-fields"].(string)
		if packed == "" {
			continue
		}
		var raw map[string][]byte
		if err := json.Unmarshal([]byte(packed), &raw); err != nil || len(raw) != len(many) || string(raw[`"\xff\x00"`]) != "\xfe\x01" {
			t.Errorf("%d of %d fields, %v", len(raw), len(many), err)
		}
		return
	}
	t.Error("the letter of many fields is gone")
}

// A dead letter keeps its fields if its body is only a part of them.
func TestReplay_keepsFieldsOfUneditable(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]map[string]any{
		"Symfony":          phpEntry(t, "{}", map[string]string{"type": "a"}, false),
		"structured event": {"content-type": "application/cloudevents+json", "body": `{"specversion":"1.0","id":"1","source":"/s","type":"a","data":{}}`},
		"corrupt":          {"holdfast-fields": "{", "body": "{}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, false)
			failed := "{" + stream + "}:" + groupName + ":failed." + driver.ClassValidation
			noError(t, f.direct.XAdd(t.Context(), &redis.XAddArgs{Stream: failed, Values: fields}).Err())
			letters := newConsumer(t, f.direct, inbox.NewMux(), inboxredis.Config{Group: groupName}).DeadLetters()
			edit := func(inbox.Message) ([]byte, error) { return []byte("edited"), nil }
			done, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test", Force: true, Edit: edit})
			if done.Failed != 1 || !errors.Is(err, driver.ErrNotEditable) {
				t.Errorf("%+v, %v", done, err)
			}
			kept := f.direct.XRange(t.Context(), failed, "-", "+").Val()
			if len(kept) != 1 || !maps.Equal(kept[0].Values, fields) {
				t.Errorf("letters %v, want %v", kept, fields)
			}
		})
	}
}

func handle(t *testing.T, mux *inbox.Mux, name string, h func(context.Context) error) {
	t.Helper()
	noError(t, inbox.Handle(mux, name, func(ctx context.Context, _ map[string]any) error { return h(ctx) }))
}

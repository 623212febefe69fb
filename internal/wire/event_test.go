package wire_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

const eventType = "application/cloudevents+json; charset=utf-8"

func events(t *testing.T, f format.CloudEvents) *wire.Events {
	t.Helper()
	form, err := wire.NewForm(f)
	if err != nil {
		t.Fatal(err)
	}
	return form.Events
}

func TestEventAttributes(t *testing.T) {
	t.Parallel()
	id := uuid.MustParse("0190a2c4-7c1e-7a39-8d47-1f0a7e9b6c11")
	e := wire.Event{ID: id, Name: "order.placed", Key: "A-1", Time: time.Unix(1_700_000_000, 0)}
	headers := map[string]string{
		"cloudEvents:subject": "orders/1", "cloudEvents:source": "/other", "cloudEvents:id": "mine", "cloudEvents:Not-A-Name": "x",
		"cloudEvents:datacontenttype": "x/y", "cloudEvents:time": "yesterday", "cloudEvents:empty": "", "tenant": "a",
	}
	want := map[string]string{
		"specversion": "1.0", "id": id.String(), "type": "order.placed", "source": "/other", "subject": "orders/1",
		"time": "2023-11-14T22:13:20Z", "partitionkey": "A-1",
	}
	if got := events(t, format.CloudEvents{Source: "/shop"}).Attributes(e, headers); !maps.Equal(got, want) {
		t.Errorf("attributes %v, want %v", got, want)
	}
}

func TestEventSource(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"", ":", strings.Repeat("x", 1025), "\xff"} {
		if _, err := wire.NewForm(format.CloudEvents{Source: source}); err == nil {
			t.Errorf("the source %.20q was taken", source)
		}
	}
}

// An envelope returns the same bytes that were put into it, and it is valid in the JSON format of CloudEvents.
func TestEnvelope(t *testing.T) {
	t.Parallel()
	attributes := map[string]string{"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.placed", "subject": "ü"}
	for _, tt := range []struct{ typ, body, member string }{
		{"application/json", `{"a": 1.0,  "b":"<"}`, "data"},
		{"application/vnd.shop+json; v=1", `[1]`, "data"},
		{"application/octet-stream", "\x00\xff", "data_base64"},
		{"text/plain", "", "data_base64"},
	} {
		envelope, typ, err := wire.Envelope(attributes, tt.typ, []byte(tt.body))
		if err != nil || typ != eventType {
			t.Fatalf("%s: %s, %v", tt.typ, typ, err)
		}
		var members map[string]any
		if err := json.Unmarshal(envelope, &members); err != nil || members[tt.member] == nil || members["datacontenttype"] != tt.typ || members["id"] != "1" {
			t.Errorf("%s: envelope %s, %v", tt.typ, envelope, err)
		}
		headers, body, dataType, ok := newSymfony(t, format.Symfony{}).Opened(map[string]string{"tenant": "a"}, envelope, typ)
		want := map[string]string{"tenant": "a"}
		for name, value := range attributes {
			want["cloudEvents:"+name] = value
		}
		if !ok || string(body) != tt.body || dataType != tt.typ || !maps.Equal(headers, want) {
			t.Errorf("%s: %q of %s, %v, %v", tt.typ, body, dataType, headers, ok)
		}
	}
	if _, _, err := wire.Envelope(attributes, "application/json", []byte(`{},"id":"2"`)); err == nil {
		t.Error("a body that is no JSON was taken for data")
	}
}

// Events of other senders: other kinds of data, and bodies that are not an event of version 1.0.
func TestOpen(t *testing.T) {
	t.Parallel()
	const head = `"specversion":"1.0","id":"1","source":"/s","type":"t"`
	for envelope, want := range map[string]string{
		`{` + head + `,"data":{"a":1}}`:                                       `{"a":1} application/json`,
		`{` + head + `}`:                                                      ` application/json`,
		`{` + head + `,"data":{"a":1},"data_base64":null}`:                    `{"a":1} application/json`,
		`{` + head + `,"data":null,"data_base64":"AP8="}`:                     "\x00\xff application/json",
		`{` + head + `,"datacontenttype":"text/plain","data":"hi"}`:           `hi text/plain`,
		`{` + head + `,"datacontenttype":"application/json","data":"hi"}`:     `"hi" application/json`,
		`{` + head + `,"datacontenttype":"image/png","data_base64":"AP8="}`:   "\x00\xff image/png",
		`{` + head + `,"flag":true,"n":7,"odd":{},"Upper":"x","data":[true]}`: `[true] application/json`,
	} {
		headers, body, typ, ok := newSymfony(t, format.Symfony{}).Opened(nil, []byte(envelope), eventType)
		if got := string(body) + " " + typ; !ok || got != want || wire.EventAttribute(headers, "id") != "1" {
			t.Errorf("%s: %q, %v", envelope, got, ok)
		}
		if strings.Contains(envelope, "flag") && (headers["cloudEvents:flag"] != "true" || headers["cloudEvents:n"] != "7" || len(headers) != 6) {
			t.Errorf("headers %v", headers)
		}
	}
	for _, envelope := range []string{
		``, `[]`, `null`, `{`, `{"specversion":"0.3","id":"1","source":"/s","type":"t"}`, `{"specversion":"1.0","id":"","source":"/s","type":"t"}`,
		`{"specversion":"1.0","id":"1","type":"t"}`, `{` + head + `,"data_base64":"?"}`, `{` + head + `,"data_base64":1}`,
		`{` + head + `,"data":1,"data_base64":"AA=="}`,
	} {
		headers, body, typ, ok := newSymfony(t, format.Symfony{}).Opened(map[string]string{"a": "b"}, []byte(envelope), eventType)
		if ok || len(headers) != 1 || string(body) != envelope || typ != eventType {
			t.Errorf("%s was taken for an event: %v", envelope, headers)
		}
	}
	for typ, readable := range map[string]bool{
		"Application/CloudEvents-batch+json": false, "application/json": true, "application/cloudevents+avro": true, "": true,
		"application/cloudevents+json; charset": false,
	} {
		body := `{` + head + `}`
		headers, got, gotType, ok := newSymfony(t, format.Symfony{}).Opened(nil, []byte(body), typ)
		if ok != readable || headers != nil || string(got) != body || gotType != typ {
			t.Errorf("%s: readable %v, %s", typ, ok, got)
		}
	}
}

// Reading an envelope with very many members, or with something behind it, costs no more than its own size. An
// envelope with the largest body in base64 is accepted.
func TestEventBounds(t *testing.T) {
	const head = `{"specversion":"1.0","id":"1","source":"/s","type":"t"`
	var many strings.Builder
	many.WriteString(head)
	for i := range 100_000 {
		fmt.Fprintf(&many, `,"a%d":1`, i)
	}
	many.WriteString("}")
	largest := head + `,"datacontenttype":"image/png","data_base64":"` + strings.Repeat("AAAA", 16<<20/4*4/3) + `"}`
	for name, tt := range map[string]struct {
		envelope string
		taken    bool
	}{
		"members": {many.String(), false},
		"largest": {largest, true},
		"larger":  {head + `,"data":"` + strings.Repeat("a", 24<<20) + `"}`, false},
		"behind":  {head + `}{}`, false},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, _, ok := newSymfony(t, format.Symfony{}).Opened(nil, []byte(tt.envelope), eventType)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; ok != tt.taken || took > 200<<20 {
			t.Errorf("%s: taken %v, %d MiB", name, ok, took>>20)
		}
	}
}

// An attribute that the event leaves out stays absent, even if a header beside the event has it.
func TestOpened_dropsForeignAttributes(t *testing.T) {
	t.Parallel()
	beside := map[string]string{"cloudEvents:partitionkey": "foreign", "cloudEvents_time": "2000-01-01T00:00:00Z", "tenant": "a"}
	headers, _, _, ok := newSymfony(t, format.Symfony{}).Opened(beside, []byte(`{"specversion":"1.0","id":"1","source":"/s","type":"t"}`), eventType)
	if !ok || wire.EventAttribute(headers, "partitionkey") != "" || wire.EventAttribute(headers, "time") != "" || headers["tenant"] != "a" || len(beside) != 3 {
		t.Errorf("headers %v", headers)
	}
}

func TestEventField(t *testing.T) {
	t.Parallel()
	for field, value := range map[string]any{
		"id": "1", "ce_": "1", "ce_Bad Name": "1", "ce_long": strings.Repeat("x", 8193), "ce_bytes": "\xff", "ce_list": []any{"1"},
	} {
		if name, _, ok := wire.EventField(field, value); ok {
			t.Errorf("%s became %s", field, name)
		}
	}
	if name, text, ok := wire.EventField("ce_subject", "orders/1"); !ok || name != "cloudEvents:subject" || text != "orders/1" {
		t.Errorf("%s %s %v", name, text, ok)
	}
}

// Names and ids of events fill in only where the transport has none.
func TestEventIdentity(t *testing.T) {
	t.Parallel()
	const id = "0190a2c4-7c1e-7a39-8d47-1f0a7e9b6c11"
	var s wire.Symfony
	for _, prefix := range []string{"cloudEvents:", "cloudEvents_"} {
		headers := map[string]string{prefix + "specversion": "1.0", prefix + "id": id, prefix + "source": "/s", prefix + "type": "t", prefix + "time": "2023-11-14T22:13:20Z"}
		if s.ID("", headers).String() != id || s.Name("", headers) != "t" || s.Name("own", headers) != "own" || wire.PublishedAt(time.Time{}, headers, uuid.Nil).Unix() != 1_700_000_000 {
			t.Errorf("%s: %v, %s", prefix, s.ID("", headers), s.Name("", headers))
		}
		if !wire.Identifies(prefix+"id") || wire.Identifies(prefix+"subject") || wire.Identifies("id") {
			t.Errorf("%s: does not identify an event", prefix)
		}
		delete(headers, prefix+"source")
		if s.ID("", headers) != uuid.Nil || s.Name("", headers) != "" || wire.EventAttribute(headers, "time") != "" {
			t.Errorf("%s: taken for an event without a source", prefix)
		}
	}
}

// Reading any envelope takes time and memory in proportion to its length. A reader that starts over for each member
// would not finish this test.
func TestOpened_readsAdversariesInLinearTime(t *testing.T) {
	const size = 2 << 20
	head := `{"specversion":"1.0","id":"1","source":"/s","type":"t",`
	fill := func(of string, size int) string { return strings.Repeat(of, size/len(of)) }
	var members strings.Builder
	for i := range 250 {
		fmt.Fprintf(&members, `"a%d":"%s",`, i, fill("x", 8<<10))
	}
	for name, tt := range map[string]struct {
		envelope string
		ok       bool
	}{
		"one name again and again": {head + fill(`"a":1,`, size) + `"data":1}`, false},
		"many names": {head + func() string {
			var all strings.Builder
			for i := range 100_000 {
				fmt.Fprintf(&all, `"n%d":1,`, i)
			}
			return all.String()
		}() + `"data":1}`, false},
		"large attributes":          {head + members.String() + `"data":1}`, true},
		"a large value, then small": {head + `"data":"` + fill("x", size/2) + `",` + fill(`"a":1,`, size/2) + `"b":1}`, false},
		"escapes":                   {head + `"datacontenttype":"text/plain","data":"` + fill(`\u0001`, size) + `"}`, true},
		"base64":                    {head + `"data_base64":"` + fill("AAAA", size) + `"}`, true},
		"nested":                    {head + `"data":` + fill("[", 9000) + fill("1,", size) + "1" + fill("]", 9000) + `}`, true},
		"nested too deep":           {head + `"data":` + fill("[", size) + `}`, false},
		"a long name":               {head + `"` + fill("x", size) + `":1,"data":1}`, true},
		"no end":                    {head + `"data":"` + fill("x", size), false},
		"a long content type":       {head + `"datacontenttype":"` + fill("a;", size) + `","data":"x"}`, true},
	} {
		body := []byte(tt.envelope)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, _, ok := newSymfony(t, format.Symfony{}).Opened(nil, body, eventType)
		runtime.ReadMemStats(&after)
		if ok != tt.ok {
			t.Errorf("%s: opened %v", name, ok)
		}
		if used := int(after.TotalAlloc-before.TotalAlloc) / len(body); used > 12 {
			t.Errorf("%s: %d bytes were allocated for each byte", name, used)
		}
	}
}

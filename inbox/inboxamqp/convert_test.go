package inboxamqp

import (
	"testing"
	"unicode/utf8"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/wire"
)

func TestMessageID(t *testing.T) {
	t.Parallel()
	const a, b = "018f8fad-5bd9-7b46-8f16-570867728950", "018f8fad-5bd9-7b46-8f16-570867728951"
	stamp := func(id string) amqp.Table { return amqp.Table{wire.HeaderStamp: `[{"messageId":"` + id + `"}]`} }
	// The id must be the same at each delivery.
	twoStamps := amqp.Table{`X-Message-Stamp-A\MessageIdStamp`: stamp(a)[wire.HeaderStamp]}
	for _, vendor := range []string{"B", "C", "D", "E", "F"} {
		twoStamps["X-Message-Stamp-"+vendor+`\MessageIdStamp`] = stamp(b)[wire.HeaderStamp]
	}
	for name, tt := range map[string]struct {
		d    amqp.Delivery
		want string
	}{
		"property":              {amqp.Delivery{MessageId: a, Headers: stamp(b)}, a},
		"stamp":                 {amqp.Delivery{Headers: stamp(b)}, b},
		"property is no UUID":   {amqp.Delivery{MessageId: "17", Headers: stamp(b)}, b},
		"two stamps":            {amqp.Delivery{Headers: twoStamps}, a},
		"nothing":               {amqp.Delivery{}, uuid.Nil.String()},
		"stamp is no UUID":      {amqp.Delivery{Headers: stamp("x")}, uuid.Nil.String()},
		"not in canonical form": {amqp.Delivery{MessageId: "{" + a + "}"}, uuid.Nil.String()},
	} {
		if got := messageID(tt.d); got.String() != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

// Whatever a stranger sends, the conversion neither panics nor passes on what is not text.
func FuzzConvert(f *testing.F) {
	f.Add("id", "type", "[{}]", "1", "2026-01-01T00:00:00Z", []byte("raw"), int64(3))
	f.Add("018f8fad-5bd9-7b46-8f16-570867728950", "", `[{"messageId":"x"}]`, "99999999999999999999", "", []byte{0xff}, int64(-1))
	f.Fuzz(func(t *testing.T, id, name, stamp, attempt, failed string, raw []byte, n int64) {
		d := amqp.Delivery{MessageId: id, Type: name, Body: raw, Headers: amqp.Table{
			wire.HeaderStamp: stamp, wire.HeaderAttempt: attempt, wire.HeaderFirstFailed: failed, wire.HeaderWait: n,
			wire.HeaderType: raw, "raw": raw, "list": []any{raw, n}, "table": amqp.Table{"n": n}, "none": nil, attempt: n,
		}}
		m := convert(d, "q")
		if m.Attempt < 1 || m.Attempt > maxAttempt {
			t.Errorf("attempt %d", m.Attempt)
		}
		for key, value := range m.Headers {
			if !utf8.ValidString(value) {
				t.Errorf("header %q: %q", key, value)
			}
		}
		if wait := waitHeader(d, 1000); wait < 0 || wait > 1000 {
			t.Errorf("wait %v", wait)
		}
		if dead := readDead(d, "default"); dead.Attempts != m.Attempt {
			t.Errorf("dead letter %+v", dead)
		}
	})
}

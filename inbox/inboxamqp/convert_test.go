package inboxamqp

import (
	"testing"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/wire"
)

// What room is made for in a copy never costs it its id.
func TestStampHeader(t *testing.T) {
	t.Parallel()
	const stamp = `[{"messageId":"018f8fad-5bd9-7b46-8f16-570867728950"}]`
	for name, tt := range map[string]struct {
		headers amqp.Table
		want    string
	}{
		"bare":    {amqp.Table{"X-Message-Stamp-MessageIdStamp": stamp, "x": stamp}, "X-Message-Stamp-MessageIdStamp"},
		"another": {amqp.Table{`X-Message-Stamp-App\Uid`: []byte(stamp), `X-Message-Stamp-App\MessageIdStamp`: "[]"}, `X-Message-Stamp-App\Uid`},
		"none":    {amqp.Table{"x": stamp}, ""},
	} {
		if got := stampHeader(tt.headers); got != tt.want {
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
			"X-Message-Stamp-MessageIdStamp": stamp, wire.HeaderAttempt: attempt, wire.HeaderFirstFailed: failed, wire.HeaderWait: n,
			wire.HeaderType: raw, "raw": raw, "list": []any{raw, n}, "table": amqp.Table{"n": n}, "none": nil, attempt: n,
		}}
		m := convert(d, "q", &wire.Symfony{})
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
		if dead := readDead(d, "default", &wire.Symfony{}); dead.Attempts != m.Attempt {
			t.Errorf("dead letter %+v", dead)
		}
	})
}

package outboxamqp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// fastProperties is the largest size of properties, in bytes, that does not slow down a classic queue.
const fastProperties = 64

// The properties on the wire must match examples/guides/wire.md exactly. Those of an ordinary message must fit
// into fastProperties.
func TestProperties(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	for _, queue := range []string{"order.placed", "reservation.was-expired"} {
		b.Queue(t, queue, nil)
	}
	ordinary := driver.Message{
		ID: uuid.MustParse("0198a7a4-0000-7000-8000-000000000001"), Name: "order.placed", ContentType: "application/json", Body: []byte("{}"),
	}
	ordinary.CreatedAt = ids.Time(ordinary.ID).Add(time.Millisecond)
	// Flags: each property has a bit, from the highest one: content type, encoding, headers, delivery mode,
	// priority, correlation id, reply to, expiration, message id, timestamp, type.
	const id = "\x240198a7a4-0000-7000-8000-000000000001"
	const stamp = "\x00\x00\x00\x00\x68\x9d\xe4\x40"
	with := func(change func(*driver.Message)) driver.Message {
		m := ordinary
		change(&m)
		return m
	}
	for name, tt := range map[string]struct {
		cfg  outboxamqp.Config
		m    driver.Message
		want string // "": only the checks below
		fits bool
	}{
		"ordinary": {m: ordinary, want: "\x10\xa0\x02" + id + "\x0corder.placed", fits: true},
		"the longest name that fits": {
			m:    with(func(m *driver.Message) { m.Name = "reservation.was-expired" }),
			want: "\x10\xa0\x02" + id + "\x17reservation.was-expired", fits: true,
		},
		"another content type": {
			m:    with(func(m *driver.Message) { m.ContentType = "text/plain" }),
			want: "\x90\xa0\x0atext/plain\x02" + id + "\x0corder.placed", fits: true,
		},
		"made long before": {
			m:    with(func(m *driver.Message) { m.CreatedAt = time.Unix(0x689de440, 0) }),
			want: "\x10\xe0\x02" + id + stamp + "\x0corder.placed", fits: true,
		},
		"headers": {
			m:    with(func(m *driver.Message) { m.Headers = map[string]string{"a": "b"} }),
			want: "\x30\xa0\x00\x00\x00\x08\x01aS\x00\x00\x00\x01b\x02" + id + "\x0corder.placed",
		},
		"for Symfony":     {cfg: outboxamqp.Config{Format: format.Symfony{Classes: map[string]string{"order.placed": `App\OrderPlaced`}}}, m: ordinary},
		"as a CloudEvent": {cfg: outboxamqp.Config{Format: format.CloudEvents{Source: "/shop"}}, m: ordinary},
		"a byte too long": {
			m:    with(func(m *driver.Message) { m.RoutingKey, m.Name = "order.placed", "reservation.were-expired" }),
			want: "\x10\xa0\x02" + id + "\x18reservation.were-expired",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var written wireLog
			dial := func(context.Context) (*amqp.Connection, error) {
				return amqp.DialConfig(b.URL, amqp.Config{Dial: written.dial})
			}
			must(t, publish(t, running(t, dial, tt.cfg), tt.m))
			got := written.properties(t)
			if tt.want != "" && string(got) != tt.want {
				t.Errorf("properties %q, want %q", got, tt.want)
			}
			if fits := len(got) <= fastProperties; fits != tt.fits {
				t.Errorf("%d bytes of properties: %q", len(got), got)
			}
			if formed := tt.cfg.Format != nil; formed && (got[0]&0x80 == 0 || got[1]&0x40 == 0) {
				t.Errorf("no content type or no timestamp with a Format: %q", got)
			}
		})
	}
}

// wireLog records the bytes written to a connection.
type wireLog struct {
	net.Conn
	mu  sync.Mutex
	all bytes.Buffer
}

func (t *wireLog) dial(network, addr string) (net.Conn, error) {
	conn, err := amqp.DefaultDial(testenv.Patience)(network, addr)
	t.Conn = conn
	return t, err
}

func (t *wireLog) Write(p []byte) (int, error) {
	t.mu.Lock()
	t.all.Write(p)
	t.mu.Unlock()
	return t.Conn.Write(p)
}

// properties returns the properties of the one published message: the payload of its header frame after the class,
// weight and body size.
func (t *wireLog) properties(tb testing.TB) []byte {
	tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	rest := bytes.Clone(t.all.Bytes()[len("AMQP0091"):])
	for len(rest) > 7 {
		size := 7 + int(binary.BigEndian.Uint32(rest[3:]))
		const header = 2
		if rest[0] == header {
			return rest[7+12 : size]
		}
		rest = rest[size+1:]
	}
	tb.Fatal("no message was written")
	return nil
}

// Published messages must equal messages that a real Symfony Messenger handled, recorded by `make interop
// RECORD=1`. Above all they must have no stamp that PHP does not know.
func TestRecorded(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "order.placed", nil)
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	for name, form := range map[string]format.Symfony{
		"stock": {Classes: classes}, "stamp": {Classes: classes, IDStamp: `App\Messenger\MessageIdStamp`}, "library": format.Freyr02(),
	} {
		text, err := os.ReadFile(filepath.Join("testdata/recorded", name+".json"))
		must(t, err)
		var want struct {
			Properties struct {
				MessageID   string `json:"message_id"`
				Type        string
				ContentType string `json:"content_type"`
				Timestamp   int64
			}
			Headers map[string]any
			Body    string
		}
		must(t, json.Unmarshal(text, &want))
		p := running(t, b.Dial, outboxamqp.Config{Format: form})
		err = publish(t, p, driver.Message{
			ID: uuid.MustParse(want.Properties.MessageID), Name: "order.placed", Body: []byte(want.Body), ContentType: "application/json",
			Headers: map[string]string{"tenant": "go"}, CreatedAt: time.Unix(want.Properties.Timestamp, 0),
		})
		must(t, err)
		d := b.Take(t, "order.placed", 1, testenv.Patience)[0]
		if d.MessageId != want.Properties.MessageID || d.Type != want.Properties.Type || d.ContentType != want.Properties.ContentType ||
			d.Timestamp.Unix() != want.Properties.Timestamp || string(d.Body) != want.Body {
			t.Errorf("%s: %+v", name, d)
		}
		for header, value := range d.Headers {
			if (header == "type" || strings.HasPrefix(header, "X-Message-Stamp-")) && want.Headers[header] != value {
				t.Errorf("%s: header %s is %v, recorded was %v", name, header, value, want.Headers[header])
			}
		}
		for header, value := range want.Headers {
			if d.Headers[header] != value {
				t.Errorf("%s: header %s is %v, recorded was %v", name, header, d.Headers[header], value)
			}
		}
	}
}

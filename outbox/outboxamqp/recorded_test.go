package outboxamqp_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/symfony"
)

// What is published is what a real Symfony Messenger has handled, as `make interop RECORD=1` has seen
// it; above all there is no stamp that PHP would not know.
func TestRecorded(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "order.placed", nil)
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	for name, format := range map[string]symfony.Format{
		"stock": symfony.Stock(classes), "stamp": {Classes: classes, IDStamp: `App\Messenger\MessageIdStamp`}, "library": symfony.Freyr02(),
	} {
		text, err := os.ReadFile(filepath.Join("testdata/recorded", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
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
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatal(err)
		}
		p := running(t, b.Dial, outboxamqp.Config{Format: format})
		err = publish(t, p, driver.Message{
			ID: uuid.MustParse(want.Properties.MessageID), Name: "order.placed", Body: []byte(want.Body), ContentType: "application/json",
			Headers: map[string]string{"tenant": "go"}, CreatedAt: time.Unix(want.Properties.Timestamp, 0),
		})
		if err != nil {
			t.Fatal(err)
		}
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

package format_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// One value configures the sending and the receiving side of a program.
func ExampleSymfony() {
	form := format.Symfony{
		Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`},
		IDStamp: `App\Messenger\MessageIdStamp`, // optional on RabbitMQ, needed on Redis
	}

	sends := outboxamqp.Config{Exchange: "shop", Format: form}
	receives := inboxamqp.Queue{Format: form}
	fmt.Println(sends.Format.Form(), receives.Format.Form())
	// Output: symfony symfony
}

// The publisher sends events; nothing else changes, and Holdfast consumers need no setting.
func ExampleCloudEvents() {
	sends := outboxamqp.Config{Exchange: "shop", Format: format.CloudEvents{Source: "/shop", Structured: true}}
	fmt.Println(sends.Format.Form())
	// Output: cloudevents
}

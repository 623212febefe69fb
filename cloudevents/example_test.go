package cloudevents_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/cloudevents"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// What a publisher sends is an event; nothing else changes, and our consumers need no setting.
func Example() {
	sends := outboxamqp.Config{Exchange: "shop", Format: cloudevents.Format{Source: "/shop", Structured: true}}
	fmt.Println(sends.Format.Form())
	// Output: cloudevents
}

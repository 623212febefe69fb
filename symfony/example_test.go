package symfony_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/symfony"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// One value for what a program sends and what it receives.
func Example() {
	format := symfony.Stock(map[string]string{"order.placed": `App\Message\OrderPlaced`})
	format.IDStamp = `App\Messenger\MessageIdStamp` // optional on RabbitMQ, needed on Redis

	sends := outboxamqp.Config{Exchange: "shop", Format: format}
	receives := inboxamqp.Config{Format: format}
	fmt.Println(sends.Format.Form(), receives.Format.Form())
	// Output: symfony symfony
}

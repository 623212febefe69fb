package outboxamqp

import (
	"context"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// Dial returns a function for NewPublisher that opens connections to the broker at
// url (amqp:// or amqps://), as amqp.DialConfig does with cfg; the zero cfg will do. Its
// connections gather the small writes of many messages into few system calls, which a
// connection dialled in another way does not.
//
// Where cfg.Dial is nil, the context bounds connecting, and its deadline the handshakes. The
// function may be called from any goroutine. A bad url is reported by its first call.
func Dial(url string, cfg amqp.Config) func(ctx context.Context) (*amqp.Connection, error) {
	return amqpconn.DialURL(url, cfg)
}

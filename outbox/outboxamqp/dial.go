package outboxamqp

import (
	"context"
	"net"

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
	return func(ctx context.Context) (*amqp.Connection, error) {
		cfg := cfg
		cfg.TLSClientConfig = cfg.TLSClientConfig.Clone() // the client writes to it
		connect := cfg.Dial
		if connect == nil {
			connect = connectWithin(ctx)
		}
		cfg.Dial = func(network, addr string) (net.Conn, error) {
			conn, err := connect(network, addr)
			if err != nil {
				return nil, err
			}
			return amqpconn.GatherWrites(conn), nil
		}
		return amqp.DialConfig(url, cfg)
	}
}

// connectWithin dials as amqp.DefaultDial does, with the deadline of ctx, which the client
// removes after the handshakes.
func connectWithin(ctx context.Context) func(network, addr string) (net.Conn, error) {
	return func(network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if deadline, ok := ctx.Deadline(); ok {
			err = conn.SetDeadline(deadline)
		}
		return conn, err
	}
}

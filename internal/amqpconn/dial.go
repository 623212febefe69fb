package amqpconn

import (
	"context"
	"maps"
	"net"

	amqp "github.com/rabbitmq/amqp091-go"
)

// DialURL returns a Dial to the broker at url, which works as amqp.DialConfig does with cfg. Its
// connections gather small writes into few system calls.
func DialURL(url string, cfg amqp.Config) Dial {
	return func(ctx context.Context) (*amqp.Connection, error) {
		cfg := cfg
		cfg.TLSClientConfig = cfg.TLSClientConfig.Clone() // the client writes to it,
		cfg.Properties = maps.Clone(cfg.Properties)       // and to them
		connect := cfg.Dial
		if connect == nil {
			connect = connectWithin(ctx)
		}
		cfg.Dial = func(network, addr string) (net.Conn, error) {
			conn, err := connect(network, addr)
			if err != nil {
				return nil, err
			}
			return GatherWrites(conn), nil
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

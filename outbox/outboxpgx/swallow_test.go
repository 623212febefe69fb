package outboxpgx_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// swallow returns the address of what a pooler in transaction mode is to a listener: everything
// passes but notifications.
func swallow(t *testing.T, rawURL string) string {
	t.Helper()
	cfg, err := pgconn.ParseConfig(rawURL)
	must(t, err)
	door, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { door.Close() })
	go func() {
		for {
			client, err := door.Accept()
			if err != nil {
				return
			}
			network, address := pgconn.NetworkAddress(cfg.Host, cfg.Port)
			server, err := net.Dial(network, address)
			if err != nil {
				client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); server.Close() }()
			go func() { passReplies(client, server); client.Close() }()
		}
	}()
	u, err := url.Parse(rawURL)
	must(t, err)
	u.Host = door.Addr().String()
	query := u.Query()
	query.Del("host")
	query.Set("sslmode", "disable")
	u.RawQuery = query.Encode()
	return u.String()
}

func passReplies(client io.Writer, server io.Reader) {
	const notification = 'A'
	head := make([]byte, 5)
	for {
		if _, err := io.ReadFull(server, head); err != nil {
			return
		}
		to := client
		if head[0] == notification {
			to = io.Discard
		}
		if _, err := to.Write(append([]byte{}, head...)); err != nil {
			return
		}
		if _, err := io.CopyN(to, server, int64(binary.BigEndian.Uint32(head[1:]))-4); err != nil {
			return
		}
	}
}

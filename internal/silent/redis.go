package silent

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Redis is a server that falls silent. It must be used in the bubble that made it.
type Redis struct {
	network
	url string // of the real server; "": the script answers

	// Reply scripts the answer to a command, as RESP; "" is +OK. It is called from any goroutine, and may block.
	Reply func(args []string) string
}

// SilenceOn makes the next connections that x describes fall silent, once every goroutine of the bubble is at rest,
// so that the background work of an earlier call does not trigger it.
func (s *Redis) SilenceOn(x testenv.Silence) {
	synctest.Wait()
	s.network.SilenceOn(x)
}

// NewRedis returns a server that forwards commands to the one of the address, or answers from a script if that is "".
func NewRedis(t testing.TB, url string) *Redis {
	s := &Redis{url: url}
	s.init(t)
	return s
}

// Client returns a client that the end of the test closes. set changes its options, if it is not nil.
func (s *Redis) Client(t testing.TB, set func(*redis.Options)) *redis.Client {
	t.Helper()
	opts := &redis.Options{Addr: "127.0.0.1:6379"} // no name to look up
	if s.url != "" {
		var err error
		if opts, err = redis.ParseURL(s.url); err != nil {
			t.Fatal(err)
		}
	}
	opts.Dialer = func(_ context.Context, _, addr string) (net.Conn, error) {
		return s.dial(func(c *conn) error { return s.serve(c, addr) })
	}
	if set != nil {
		set(opts)
	}
	client := redis.NewClient(opts)
	t.Cleanup(func() {
		s.Heal() // for calls on silent connections
		_ = client.Close()
	})
	return client
}

func (s *Redis) serve(c *conn, addr string) error {
	var server *bufio.ReadWriter
	if s.url != "" {
		conn, err := c.upstream(addr)
		if err != nil {
			return err
		}
		server = bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn))
	}
	for client := bufio.NewReader(c); ; {
		command, args, err := readValue(client)
		if err != nil {
			return err
		}
		if !c.arrives(command) {
			continue
		}
		reply := []byte(s.scripted(args))
		if server != nil {
			_, _ = server.Write(command)
			if err := server.Flush(); err != nil {
				return err
			}
			if reply, _, err = readValue(server.Reader); err != nil {
				return err
			}
		}
		if err := c.answer(reply); err != nil {
			return err
		}
	}
}

func (s *Redis) scripted(args []string) string {
	if s.url != "" {
		return ""
	}
	if s.Reply != nil {
		if reply := s.Reply(args); reply != "" {
			return reply
		}
	}
	switch strings.ToLower(args[0]) {
	case "hello":
		return "-ERR unknown command\r\n" // the client goes on with RESP2
	case "ping":
		return "+PONG\r\n"
	case "mget":
		return "*1\r\n$-1\r\n"
	}
	return "+OK\r\n"
}

// readValue reads one RESP value: its bytes, and the strings of an array of strings.
func readValue(r *bufio.Reader) (raw []byte, args []string, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return nil, nil, err
	}
	raw = append(raw, line...)
	n, _ := strconv.Atoi(strings.TrimSpace(string(raw[1:])))
	switch raw[0] {
	case '$', '=', '!':
		if n < 0 {
			return raw, nil, nil
		}
		body := make([]byte, n+2)
		if _, err := io.ReadFull(r, body); err != nil {
			return nil, nil, err
		}
		return append(raw, body...), []string{string(body[:n])}, nil
	case '%', '|':
		n *= 2
	case '*', '~', '>':
	default:
		return raw, nil, nil
	}
	for range n {
		part, texts, err := readValue(r)
		if err != nil {
			return nil, nil, err
		}
		raw, args = append(raw, part...), append(args, texts...)
	}
	return raw, args, nil
}

// BothClients runs a test in bubbles, with a client of the real server that respects the deadlines of contexts and
// with one that does not. url returns the address of a database.
func BothClients(t *testing.T, url func(testing.TB) string, readTimeout time.Duration, test func(t *testing.T, client *redis.Client, server *Redis)) {
	t.Helper()
	url(t) // skips before there are subtests
	for _, heeds := range []bool{false, true} {
		t.Run(fmt.Sprint("heeds deadlines=", heeds), func(t *testing.T) {
			t.Parallel()
			address := url(t)
			synctest.Test(t, func(t *testing.T) {
				server := NewRedis(t, address)
				test(t, server.Client(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.ReadTimeout, o.PoolSize = heeds, readTimeout, 100
				}), server)
			})
		})
	}
}

// Fill leaves n connections idle in the pool of a client.
func Fill(t testing.TB, client *redis.Client, n int) {
	t.Helper()
	var held []*redis.Conn
	for range n {
		conn := client.Conn()
		if err := conn.Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	for _, conn := range held {
		_ = conn.Close() // back to the pool
	}
}

package testenv_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// product is how the tests below use one kind of server.
type product struct {
	kind  testenv.Kind
	extra []string
	// write stores something durable; read fails unless it is there.
	write, read func(ctx context.Context, url string) error
}

var products = []product{
	{
		kind: testenv.Postgres,
		write: func(ctx context.Context, url string) error {
			return withPostgres(ctx, url, func(conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "DROP TABLE IF EXISTS kept; CREATE TABLE kept AS SELECT 42 AS answer")
				return err
			})
		},
		read: func(ctx context.Context, url string) error {
			return withPostgres(ctx, url, func(conn *pgx.Conn) error {
				var answer int
				return conn.QueryRow(ctx, "SELECT answer FROM kept").Scan(&answer)
			})
		},
	},
	{
		kind:  testenv.Redis,
		extra: []string{"--appendonly", "yes", "--appendfsync", "always"},
		write: func(ctx context.Context, url string) error {
			return withRedis(url, func(client *redis.Client) error { return client.Set(ctx, "kept", 42, 0).Err() })
		},
		read: func(ctx context.Context, url string) error {
			return withRedis(url, func(client *redis.Client) error { return client.Get(ctx, "kept").Err() })
		},
	},
	{
		kind: testenv.RabbitMQ,
		write: func(ctx context.Context, url string) error {
			return withRabbitMQ(ctx, url, func(ch *amqp.Channel) error {
				if _, err := ch.QueueDeclare("kept", true, false, false, false, nil); err != nil {
					return err
				}
				if err := ch.Confirm(false); err != nil {
					return err
				}
				msg := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte("42")}
				confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "kept", true, false, msg)
				if err != nil {
					return err
				}
				_, err = confirm.WaitContext(ctx)
				return err
			})
		},
		read: func(ctx context.Context, url string) error {
			return withRabbitMQ(ctx, url, func(ch *amqp.Channel) error {
				queue, err := ch.QueueDeclarePassive("kept", true, false, false, false, nil)
				if err == nil && queue.Messages != 1 {
					err = fmt.Errorf("queue holds %d messages, want 1", queue.Messages)
				}
				return err
			})
		},
	},
}

func TestServer(t *testing.T) {
	t.Parallel()
	for _, p := range products {
		t.Run(string(p.kind), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := testenv.Private(t, p.kind, p.extra...)
			address := s.URL()
			// RabbitMQ confirms a message before the definition of its queue has reached the disk.
			testenv.Eventually(t, func() error {
				must(t, p.write(ctx, address))
				if p.kind == testenv.RabbitMQ {
					must(t, s.WriteDefinitions(ctx))
				}
				must(t, s.Kill())
				if err := p.read(ctx, address); err == nil {
					t.Fatal("a killed server answers")
				}
				if left := testenv.Processes(s); len(left) > 0 {
					t.Fatalf("processes %v are left after Kill", left)
				}
				must(t, s.Start(ctx))
				return p.read(ctx, address)
			})

			must(t, s.Pause())
			silent, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			if err := within(silent, func() error { return p.read(silent, address) }); err == nil {
				t.Fatal("a paused server answers")
			}
			must(t, s.Resume())
			testenv.Eventually(t, func() error { return p.read(ctx, address) })

			must(t, s.Restart(ctx))
			must(t, p.read(ctx, address))

			must(t, s.Stop())
			if left := testenv.Processes(s); len(left) > 0 {
				t.Fatalf("processes %v are left after Stop", left)
			}
		})
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ, testenv.PgBouncer, testenv.Prometheus} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			var extra []string
			if kind == testenv.PgBouncer {
				extra = []string{testenv.PostgresURL(t)}
			}
			s := testenv.Private(t, kind, extra...)
			must(t, s.Pause()) // a paused server is ended, too
			must(t, s.Close())
			must(t, s.Close())
			if left := testenv.Processes(s); len(left) > 0 {
				t.Errorf("processes %v are left", left)
			}
			if _, err := os.Stat(testenv.Dir(s)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder is left: %v", err)
			}
			if err := s.Start(t.Context()); err == nil {
				t.Error("a closed server starts")
			}
		})
	}
}

func TestLaunchReportsLog(t *testing.T) {
	t.Parallel()
	testenv.Private(t, testenv.Redis) // for the skip
	_, err := testenv.Launch(t.Context(), testenv.Redis, "--no-such-option", "1")
	if err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Fatalf("the error does not hold the server's log: %v", err)
	}
}

func TestLaunchUnknownKind(t *testing.T) {
	t.Parallel()
	if _, err := testenv.Launch(t.Context(), "oracle"); err == nil {
		t.Fatal("no error")
	}
}

// A session's parameters of the address are set by the pooler, which takes none from clients.
func TestPgBouncerSetsParameters(t *testing.T) {
	t.Parallel()
	address, err := url.Parse(testenv.PostgresURL(t))
	must(t, err)
	query := address.Query()
	query.Set("search_path", `"it's", public`)
	address.RawQuery = query.Encode()
	s := testenv.Private(t, testenv.PgBouncer, address.String())
	must(t, withPostgres(t.Context(), s.URL(), func(conn *pgx.Conn) error {
		var got string
		err := conn.QueryRow(t.Context(), "SHOW search_path", pgx.QueryExecModeExec).Scan(&got)
		if err == nil && !strings.Contains(got, "it's") {
			err = fmt.Errorf("search_path is %s", got)
		}
		return err
	}))
	if _, err := testenv.Launch(t.Context(), testenv.PgBouncer); err == nil {
		t.Error("it starts without a Postgres")
	}
}

func TestURLsAreLoopback(t *testing.T) {
	t.Parallel()
	s := testenv.Private(t, testenv.Redis)
	u, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	if u.Hostname() != "127.0.0.1" || u.Port() == "6379" {
		t.Errorf("address %s", u.Host)
	}
}

func withPostgres(ctx context.Context, url string, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return errors.Join(do(conn), conn.Close(context.WithoutCancel(ctx)))
}

func withRedis(url string, do func(*redis.Client) error) error {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return err
	}
	opts.MaxRetries = -1
	opts.ReadTimeout = time.Minute // a busy machine takes longer than the usual 3 s
	opts.ContextTimeoutEnabled = true
	client := redis.NewClient(opts)
	return errors.Join(do(client), client.Close())
}

func withRabbitMQ(_ context.Context, url string, do func(*amqp.Channel) error) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: amqp.DefaultDial(time.Minute)})
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	return errors.Join(do(ch), conn.Close())
}

// within gives up on do, which may not heed ctx, but lets it end in peace.
func within(ctx context.Context, do func() error) error {
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestCrashed(t *testing.T) {
	t.Parallel()
	s := testenv.Private(t, testenv.Redis)
	must(t, syscall.Kill(testenv.Pid(s), syscall.SIGKILL))
	testenv.Eventually(t, func() error {
		if !s.Crashed() {
			return errors.New("it is not seen to have crashed")
		}
		return nil
	})
	must(t, s.Start(t.Context()))
	if s.Crashed() {
		t.Error("a server that was started again has crashed")
	}
	for what, end := range map[string]func() error{"killed": s.Kill, "stopped": s.Stop} {
		must(t, end())
		if s.Crashed() {
			t.Errorf("a server that was %s has crashed", what)
		}
		must(t, s.Start(t.Context()))
	}
}

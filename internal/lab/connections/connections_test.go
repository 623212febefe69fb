// Package connections tests how services connect to their servers: over TLS with a private authority,
// and with passwords that change while they run.
package connections_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A client that trusts the private authority of a server can use the server. A client with another
// authority, another server name or a clock one year ahead gets an error with the cause.
func TestTLS(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T, testenv.Certificate) func(context.Context, *tls.Config) error{
		"Postgres": postgres, "Redis": redisServer, "RabbitMQ": rabbitmq,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "Postgres" {
				testenv.Nightly(t, "a private server of each kind")
			}
			own, other := testenv.NewCertificate(t), testenv.NewCertificate(t)
			use := start(t, own)
			for _, tc := range []struct {
				name   string
				config *tls.Config
				cause  string
			}{
				{"right authority", &tls.Config{RootCAs: own.Pool, ServerName: "127.0.0.1"}, ""},
				{"wrong authority", &tls.Config{RootCAs: other.Pool, ServerName: "127.0.0.1"}, "certificate signed by unknown authority"},
				{"no authority", &tls.Config{ServerName: "127.0.0.1"}, "certificate signed by unknown authority"},
				{"wrong name", &tls.Config{RootCAs: own.Pool, ServerName: "db.example"}, "valid for localhost, not db.example"},
				{"expired", &tls.Config{RootCAs: own.Pool, ServerName: "127.0.0.1", Time: nextYear}, "certificate has expired"},
			} {
				t.Run(tc.name, func(t *testing.T) {
					ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
					defer cancel()
					testenv.Eventually(t, func() error { // a busy machine may need more than one call's time
						err := use(ctx, tc.config)
						if tc.cause == "" {
							return err
						}
						if err == nil || !strings.Contains(err.Error(), tc.cause) {
							return fmt.Errorf("the error is %v, want one with %q", err, tc.cause)
						}
						return nil
					})
				})
			}
		})
	}
}

func nextYear() time.Time { return time.Now().AddDate(1, 0, 0) }

func postgres(t *testing.T, c testenv.Certificate) func(context.Context, *tls.Config) error {
	t.Helper()
	server := testenv.Private(t, testenv.Postgres, "-c", "ssl=on", "-c", "ssl_cert_file="+c.Cert, "-c", "ssl_key_file="+c.Key)
	return func(ctx context.Context, config *tls.Config) error {
		cfg, err := pgxpool.ParseConfig(server.URL())
		if err != nil {
			return err
		}
		cfg.ConnConfig.TLSConfig = config
		txretry.PreparePool(cfg)
		pool, err := pgxpool.NewWithConfig(ctx, cfg)
		if err != nil {
			return err
		}
		defer pool.Close()
		manager, err := txretry.New(pool, txretry.Config{})
		if err != nil {
			return err
		}
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			var encrypted bool
			err := tx.QueryRow(ctx, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&encrypted)
			if err == nil && !encrypted {
				err = fmt.Errorf("not encrypted")
			}
			return err
		})
	}
}

func redisServer(t *testing.T, c testenv.Certificate) func(context.Context, *tls.Config) error {
	t.Helper()
	port := freePort(t)
	testenv.Private(t, testenv.Redis, "--tls-port", fmt.Sprint(port), "--tls-auth-clients", "no",
		"--tls-ca-cert-file", c.CA, "--tls-cert-file", c.Cert, "--tls-key-file", c.Key)
	return func(ctx context.Context, config *tls.Config) error {
		client := redis.NewClient(&redis.Options{
			Addr: fmt.Sprint("127.0.0.1:", port), TLSConfig: config, ContextTimeoutEnabled: true,
		})
		defer client.Close()
		limiter, err := ratelimitredis.New(client, ratelimitredis.Config{})
		if err != nil {
			return err
		}
		return limiter.Check(ctx)
	}
}

func rabbitmq(t *testing.T, c testenv.Certificate) func(context.Context, *tls.Config) error {
	t.Helper()
	port := freePort(t)
	server := testenv.Private(t, testenv.RabbitMQ, fmt.Sprint("listeners.ssl.1 = 127.0.0.1:", port),
		"ssl_options.cacertfile = "+c.CA, "ssl_options.certfile = "+c.Cert, "ssl_options.keyfile = "+c.Key,
		"ssl_options.verify = verify_none", "ssl_options.fail_if_no_peer_cert = false")
	address, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	address.Scheme, address.Host = "amqps", fmt.Sprint("127.0.0.1:", port)
	return func(ctx context.Context, config *tls.Config) error {
		publisher, err := outboxamqp.NewPublisher(
			outboxamqp.Dial(address.String(), amqp.Config{TLSClientConfig: config}), outboxamqp.Config{Exchange: "amq.topic"})
		if err != nil {
			return err
		}
		return publisher.Check(ctx)
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	port, err := testenv.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

const user = "app"

var quiet = slog.New(slog.DiscardHandler)

// passwords is the current secret, which processes read for each connection.
type passwords struct{ current atomic.Pointer[string] }

func newPasswords(first string) *passwords {
	var p passwords
	p.current.Store(&first)
	return &p
}

func (p *passwords) read(context.Context) (string, error) { return *p.current.Load(), nil }

// rotates makes the server accept another password and drop its clients. New connections fail with the
// old password, with an error of that cause, and work with the new one as soon as the secret has it.
func rotates(t *testing.T, secret *passwords, use func(context.Context) error, rotate func(password string), cause string) {
	t.Helper()
	try := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		defer cancel()
		return use(ctx)
	}
	testenv.Eventually(t, try) // a busy machine may need more than one call's time
	second := "second"
	rotate(second)
	testenv.Eventually(t, func() error {
		if err := try(); err == nil || !strings.Contains(err.Error(), cause) {
			return fmt.Errorf("with the old password: %v, want %q", err, cause)
		}
		return nil
	})
	secret.current.Store(&second)
	testenv.Eventually(t, try)
}

func TestPasswordRotatesOnPostgres(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "every run rotates the password of Redis")
	dir, err := os.MkdirTemp("", "holdfast-") // t.TempDir is closed to the user postgres
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	rules := filepath.Join(dir, "pg_hba.conf")
	must(t, os.WriteFile(rules, []byte("host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"), 0o644))
	server := testenv.Private(t, testenv.Postgres, "-c", "hba_file="+rules)
	admin, err := pgx.Connect(t.Context(), server.URL())
	must(t, err)
	t.Cleanup(func() { _ = admin.Close(context.WithoutCancel(t.Context())) })
	run := func(sql string) {
		t.Helper()
		_, err := admin.Exec(t.Context(), sql)
		must(t, err)
	}
	run("CREATE ROLE app SUPERUSER LOGIN PASSWORD 'first'")

	secret := newPasswords("first")
	address, err := url.Parse(server.URL())
	must(t, err)
	address.User = url.User(user)
	cfg, err := pgxpool.ParseConfig(address.String())
	must(t, err)
	setPassword(cfg, secret.read)
	txretry.PreparePool(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	must(t, err)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	rotates(t, secret, func(ctx context.Context) error {
		if err := store.Check(ctx); err != nil { // it listens on its own connection
			return err
		}
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT 1")
			return err
		})
	}, func(password string) {
		run("ALTER ROLE app PASSWORD '" + password + "'")
		run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
	}, "password authentication failed")
}

func setPassword(cfg *pgxpool.Config, password func(context.Context) (string, error)) {
	cfg.BeforeConnect = func(ctx context.Context, conn *pgx.ConnConfig) (err error) {
		conn.Password, err = password(ctx)
		return err
	}
}

func TestPasswordRotatesOnRedis(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	options, err := redis.ParseURL(server.URL())
	must(t, err)
	admin := redis.NewClient(options)
	t.Cleanup(func() { _ = admin.Close() })
	run := func(args ...any) {
		t.Helper()
		must(t, admin.Do(t.Context(), args...).Err())
	}
	run("ACL", "SETUSER", user, "on", ">first", "~*", "&*", "+@all")

	secret := newPasswords("first")
	options, err = redis.ParseURL(server.URL())
	must(t, err)
	options.ContextTimeoutEnabled = true
	setCredentials(options, secret.read)
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{Logger: quiet})
	must(t, err)
	limit := ratelimit.Limit{Name: "calls", Max: 1_000_000}
	rotates(t, secret, func(ctx context.Context) error {
		_, err := limiter.Allow(ctx, ratelimit.Charge{Limit: limit})
		return err
	}, func(password string) {
		run("ACL", "SETUSER", user, "resetpass", ">"+password)
		run("CLIENT", "KILL", "USER", user)
	}, "WRONGPASS")
}

func setCredentials(options *redis.Options, password func(context.Context) (string, error)) {
	options.CredentialsProviderContext = func(ctx context.Context) (string, string, error) {
		current, err := password(ctx)
		return user, current, err
	}
}

func TestPasswordRotatesOnRabbitMQ(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "every run rotates the password of Redis")
	owner := amqptest.New(t)
	broker := owner.User(t, user, amqptest.Rights{Read: ".*", Write: ".*"})
	secret := newPasswords("password") // the password that amqptest sets
	address, err := url.Parse(broker.URL)
	must(t, err)
	dial := dialWith(address, secret.read)
	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Logger: quiet})
	must(t, err)
	consumer := newConsumer(t, owner, dial)
	runBeside(t, publisher.Run)
	runBeside(t, consumer.Run)
	rotates(t, secret, func(ctx context.Context) error {
		if err := publisher.Check(ctx); err != nil { // over its own connection
			return err
		}
		return errors.Join(publisher.Ready(ctx), consumer.Ready(ctx))
	}, func(password string) {
		broker.SetPassword(t, password)
		broker.CloseConnections(t)
	}, "username or password not allowed")
}

// newConsumer returns a consumer whose queue the owner of the virtual host creates, because the
// consumer's user may not.
func newConsumer(t *testing.T, owner *amqptest.Broker, dial func(context.Context) (*amqp.Connection, error)) *inboxamqp.Consumer {
	t.Helper()
	processor, queue, cfg := inbox.NewMux(), inboxamqp.Queue{Name: "orders"}, inbox.ConsumerConfig{Logger: quiet}
	maker, err := inboxamqp.NewConsumer(owner.Dial, queue, processor, cfg)
	must(t, err)
	must(t, maker.Setup(t.Context()))
	consumer, err := inboxamqp.NewConsumer(dial, queue, processor, cfg)
	must(t, err)
	return consumer
}

// runBeside runs a service until the test ends.
func runBeside(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

func dialWith(broker *url.URL, password func(context.Context) (string, error)) func(context.Context) (*amqp.Connection, error) {
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		current, err := password(ctx)
		if err != nil {
			return nil, err
		}
		address := *broker
		address.User = url.UserPassword(broker.User.Username(), current)
		return outboxamqp.Dial(address.String(), amqp.Config{})(ctx)
	}
	return dial
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

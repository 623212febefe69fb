package connections_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A server whose certificate a private authority has issued is used by who trusts that one. Who trusts
// another, means another server or looks a year later gets an error that says which of these it is.
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
							return fmt.Errorf("the error is %v, want one that says %q", err, tc.cause)
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

package connections_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

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

const user = "app"

var quiet = slog.New(slog.DiscardHandler)

// passwords is the secret as a process reads it: whatever it is at that moment.
type passwords struct{ current atomic.Pointer[string] }

func newPasswords(first string) *passwords {
	var p passwords
	p.current.Store(&first)
	return &p
}

func (p *passwords) read(context.Context) (string, error) { return *p.current.Load(), nil }

// rotates has the server take another password and drop its clients. What runs fails for the old
// one, with an error that says so, and goes on with the new one once the secret holds it.
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
		if err := store.Check(ctx); err != nil { // it listens, on a connection of its own
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
	secret := newPasswords("password") // what amqptest gives
	address, err := url.Parse(broker.URL)
	must(t, err)
	dial := dialWith(address, secret.read)
	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Logger: quiet})
	must(t, err)
	consumer := newConsumer(t, owner, dial)
	runBeside(t, publisher.Run)
	runBeside(t, consumer.Run)
	rotates(t, secret, func(ctx context.Context) error {
		if err := publisher.Check(ctx); err != nil { // over a connection of its own
			return err
		}
		return errors.Join(publisher.Ready(ctx), consumer.Ready(ctx))
	}, func(password string) {
		broker.SetPassword(t, password)
		broker.CloseConnections(t)
	}, "username or password not allowed")
}

// newConsumer has a queue that the owner of the virtual host makes: who consumes may not.
func newConsumer(t *testing.T, owner *amqptest.Broker, dial func(context.Context) (*amqp.Connection, error)) *inboxamqp.Consumer {
	t.Helper()
	processor, cfg := inbox.NewMux(), inboxamqp.Config{}
	cfg.Logger = quiet
	maker, err := inboxamqp.NewConsumer(owner.Dial, "orders", processor, cfg)
	must(t, err)
	must(t, maker.Setup(t.Context()))
	consumer, err := inboxamqp.NewConsumer(dial, "orders", processor, cfg)
	must(t, err)
	return consumer
}

// runBeside has run work until the test ends.
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

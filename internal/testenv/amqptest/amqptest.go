// Package amqptest gives each test its own virtual host on the shared RabbitMQ.
package amqptest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const dialTimeout = 30 * time.Second

// Broker is a fresh virtual host.
type Broker struct {
	// URL is the address of the virtual host, with credentials.
	URL string
	// VHost is the name of the virtual host.
	VHost string

	admin string
}

// New creates a virtual host. When the test ends, it is deleted with its queues and connections.
func New(t testing.TB) *Broker {
	t.Helper()
	return On(t, testenv.AMQPURL(t), testenv.AMQPAdminURL(t))
}

// On is New on another broker, such as a private server.
func On(t testing.TB, rawURL, adminURL string) *Broker {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	b := &Broker{VHost: "test-" + strings.ToLower(rand.Text()[:12]), admin: adminURL}
	u.Path = "/" + b.VHost
	b.URL = u.String()
	if err := testenv.AddVHost(t.Context(), adminURL, b.VHost); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := testenv.RemoveVHost(context.WithoutCancel(t.Context()), adminURL, b.VHost); err != nil {
			t.Fatal(err)
		}
	})
	user := url.PathEscape(u.User.Username())
	b.mustCall(t, http.MethodPut, "/api/permissions/"+b.VHost+"/"+user,
		map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
	return b
}

// Rights are a user's permissions in the virtual host, as regular expressions for names. The zero
// Rights allow nothing.
type Rights struct {
	// Configure matches the exchanges and queues that the user may declare.
	Configure string
	// Read matches the queues that the user may consume.
	Read string
	// Write matches the exchanges and queues that the user may write to.
	Write string
	// Topics has an expression for routing keys per topic exchange. Exchanges that are not listed
	// accept any key.
	Topics map[string]string
}

// User creates a user and returns the broker with the user's URL. The user is removed when the test
// ends. Another call with the same name changes the rights.
func (b *Broker) User(t testing.TB, name string, rights Rights) *Broker {
	t.Helper()
	u, err := url.Parse(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	name = b.VHost + "-" + name // users belong to the whole broker
	u.User = url.UserPassword(name, "password")
	b.mustCall(t, http.MethodPut, "/api/users/"+name, map[string]string{"password": "password", "tags": ""}, nil)
	t.Cleanup(func() {
		_ = b.call(context.WithoutCancel(t.Context()), http.MethodDelete, "/api/users/"+name, nil, nil) // an earlier call may have removed it
	})
	b.mustCall(t, http.MethodPut, "/api/permissions/"+b.VHost+"/"+name,
		map[string]string{"configure": rights.Configure, "write": rights.Write, "read": rights.Read}, nil)
	for exchange, topics := range rights.Topics {
		b.mustCall(t, http.MethodPut, "/api/topic-permissions/"+b.VHost+"/"+name,
			map[string]string{"exchange": exchange, "write": topics, "read": ""}, nil)
	}
	return &Broker{URL: u.String(), VHost: b.VHost, admin: b.admin}
}

// SetPassword changes the password of the user in URL. Connections stay open.
func (b *Broker) SetPassword(t testing.TB, password string) {
	t.Helper()
	u, err := url.Parse(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	b.mustCall(t, http.MethodPut, "/api/users/"+url.PathEscape(u.User.Username()), map[string]string{"password": password, "tags": ""}, nil)
}

// Dial opens a connection. It has the signature that the AMQP adapters need. The caller closes the
// connection.
func (b *Broker) Dial(ctx context.Context) (*amqp.Connection, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return amqp.DialConfig(b.URL, amqp.Config{Dial: amqp.DefaultDial(dialTimeout)})
}

// Channel opens a connection and a channel on it. Both are closed when the test ends.
func (b *Broker) Channel(t testing.TB) *amqp.Channel {
	t.Helper()
	conn, err := b.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // the test may have broken it on purpose
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

// Queue declares a durable queue.
func (b *Broker) Queue(t testing.TB, name string, args amqp.Table) {
	t.Helper()
	b.once(t, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, args)
		return err
	})
}

// Full fills an existing queue with messages of type "filler" until it rejects more. It stays full
// until the test calls the returned function.
func (b *Broker) Full(t testing.TB, queue string) (empty func()) {
	t.Helper()
	path := "/api/policies/" + b.VHost + "/full." + queue
	b.mustCall(t, http.MethodPut, path, map[string]any{
		"pattern": "^" + regexp.QuoteMeta(queue) + "$", "apply-to": "queues",
		"definition": map[string]any{"max-length": 1, "overflow": "reject-publish"},
	}, nil)
	b.once(t, func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); { // the policy takes a moment
			confirm, err := ch.PublishWithDeferredConfirm("", queue, true, false, amqp.Publishing{Type: "filler"})
			if err != nil {
				return err
			}
			if taken, err := confirm.WaitContext(t.Context()); err != nil || !taken {
				return err
			}
		}
		return fmt.Errorf("queue %s does not fill up", queue)
	})
	return func() { b.mustCall(t, http.MethodDelete, path, nil, nil) }
}

// Exchange declares a durable exchange.
func (b *Broker) Exchange(t testing.TB, name, kind string) {
	t.Helper()
	b.once(t, func(ch *amqp.Channel) error { return ch.ExchangeDeclare(name, kind, true, false, false, false, nil) })
}

// Bind binds a queue to an exchange.
func (b *Broker) Bind(t testing.TB, queue, key, exchange string) {
	t.Helper()
	b.once(t, func(ch *amqp.Channel) error { return ch.QueueBind(queue, key, exchange, false, nil) })
}

// Publish sends a message and waits for the broker's confirm.
func (b *Broker) Publish(t testing.TB, exchange, key string, msg amqp.Publishing) {
	t.Helper()
	b.once(t, func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		confirm, err := ch.PublishWithDeferredConfirmWithContext(t.Context(), exchange, key, true, false, msg)
		if err != nil {
			return err
		}
		acked, err := confirm.WaitContext(t.Context())
		if err == nil && !acked {
			err = fmt.Errorf("nacked")
		}
		return err
	})
}

// Queues returns the arguments of all queues, by name.
func (b *Broker) Queues(t testing.TB) map[string]map[string]any {
	t.Helper()
	var all []struct {
		Name      string
		Arguments map[string]any
	}
	b.mustCall(t, http.MethodGet, "/api/queues/"+b.VHost, nil, &all)
	queues := map[string]map[string]any{}
	for _, q := range all {
		queues[q.Name] = q.Arguments
	}
	return queues
}

// Depth returns how many messages of the queue are ready for delivery.
func (b *Broker) Depth(t testing.TB, queue string) int {
	t.Helper()
	var depth int
	b.once(t, func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		depth = q.Messages
		return err
	})
	return depth
}

// Take removes want messages from the queue and returns them in delivery order. It fails the test
// if they have not arrived within timeout. Messages beyond want stay in the queue.
func (b *Broker) Take(t testing.TB, queue string, want int, timeout time.Duration) []amqp.Delivery {
	t.Helper()
	var taken []amqp.Delivery
	b.once(t, func(ch *amqp.Channel) error {
		deadline := time.Now().Add(timeout) // timing: the caller gives testenv.Patience
		for len(taken) < want {
			msg, ok, err := ch.Get(queue, true)
			switch {
			case err != nil:
				return err
			case ok:
				taken = append(taken, msg)
			case time.Now().After(deadline):
				return fmt.Errorf("queue %s gave %d of %d messages within %v", queue, len(taken), want, timeout)
			default:
				time.Sleep(20 * time.Millisecond)
			}
		}
		return nil
	})
	return taken
}

// CloseConnections makes the broker close every connection of the virtual host, as an operator
// would. It waits until the broker lists at least one.
func (b *Broker) CloseConnections(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var open []struct{ Name string }
		if err := b.call(t.Context(), http.MethodGet, "/api/vhosts/"+b.VHost+"/connections", nil, &open); err != nil {
			return err
		}
		if len(open) == 0 {
			return fmt.Errorf("amqptest: no connection to close")
		}
		for _, conn := range open {
			// A connection that has already ended answers 404.
			_ = b.call(t.Context(), http.MethodDelete, "/api/connections/"+url.PathEscape(conn.Name), nil, nil)
		}
		return nil
	})
}

// once runs do on its own connection.
func (b *Broker) once(t testing.TB, do func(*amqp.Channel) error) {
	t.Helper()
	conn, err := b.Dial(t.Context())
	if err != nil {
		t.Fatalf("amqptest: %v", err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err == nil {
		err = do(ch)
	}
	if err != nil {
		t.Fatalf("amqptest: %v", err)
	}
}

func (b *Broker) mustCall(t testing.TB, method, path string, in, out any) {
	t.Helper()
	// The test's context has already ended when its virtual host is deleted.
	if err := b.call(context.WithoutCancel(t.Context()), method, path, in, out); err != nil {
		t.Fatal(err)
	}
}

// call sends a request to the management API.
func (b *Broker) call(ctx context.Context, method, path string, in, out any) error {
	return testenv.Admin(ctx, b.admin, method, path, in, out)
}

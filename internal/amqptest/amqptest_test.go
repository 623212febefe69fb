package amqptest_test

import (
	"os"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestBroker(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "orders", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "order.*", "orders")
	for _, body := range []string{"1", "2", "3"} {
		b.Publish(t, "orders", "order.placed", amqp.Publishing{Body: []byte(body)})
	}
	if n := b.Depth(t, "q"); n != 3 {
		t.Errorf("depth %d, want 3", n)
	}
	got := b.Take(t, "q", 2, testenv.Patience)
	if len(got) != 2 || string(got[0].Body) != "1" || string(got[1].Body) != "2" {
		t.Errorf("took %v", got)
	}
	if n := b.Depth(t, "q"); n != 1 {
		t.Errorf("depth %d, want 1", n)
	}
}

func TestCloseConnections(t *testing.T) {
	t.Parallel()
	b, other := amqptest.New(t), amqptest.New(t)
	closed := b.Channel(t).NotifyClose(make(chan *amqp.Error, 1))
	spared := other.Channel(t)
	b.CloseConnections(t)
	select {
	case err := <-closed:
		if err == nil || err.Code != amqp.ConnectionForced {
			t.Errorf("closed with %v, want %d", err, amqp.ConnectionForced)
		}
	case <-time.After(testenv.Patience):
		t.Error("the connection is still open")
	}
	if spared.IsClosed() {
		t.Error("a connection of another virtual host was closed")
	}
}

func TestUser(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "open", "topic")
	b.Exchange(t, "closed", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "#", "open")
	b.Bind(t, "q", "#", "closed")
	rights := amqptest.Rights{Write: "^open$", Topics: map[string]string{"open": "^good"}}
	user := b.User(t, "user", rights)
	user.Publish(t, "open", "good.one", amqp.Publishing{})
	for exchange, key := range map[string]string{"open": "bad.one", "closed": "good.one"} {
		ch := user.Channel(t)
		refused := ch.NotifyClose(make(chan *amqp.Error, 1))
		if err := ch.Publish(exchange, key, false, false, amqp.Publishing{}); err != nil {
			t.Fatal(err)
		}
		if err := <-refused; err == nil || err.Code != amqp.AccessRefused {
			t.Errorf("%s, %s: %v, want a refusal", exchange, key, err)
		}
	}
	rights.Write = "^(open|closed)$"
	b.User(t, "user", rights).Publish(t, "closed", "good.one", amqp.Publishing{})
	b.Take(t, "q", 2, testenv.Patience)
}

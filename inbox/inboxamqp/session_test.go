package inboxamqp

import (
	"errors"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// listening is a session on a channel to nowhere.
func listening(t *testing.T, ch *channel) *session {
	t.Helper()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Batch: 1}}}
	return newSession(&run{cfg: cfg, life: newLifetime(t.Context(), 0), quota: &quota{cfg: cfg}, workers: &workers{}}, ch)
}

// The client closes all listeners at once when a channel ends, the listener for the
// consumer's cancellation included.
func TestEndOfChannelIsNoCancellation(t *testing.T) {
	t.Parallel()
	for range 50 {
		closes, cancels, deliveries := make(chan *amqp.Error, 1), make(chan string), make(chan amqp.Delivery)
		closes <- amqp.ErrUnexpectedFrame
		close(closes)
		close(cancels)
		close(deliveries)
		s := listening(t, &channel{conn: &amqpconn.Conn{}, closes: closes, cancels: cancels})
		if _, why := s.dispatch(deliveries); !errors.Is(why, amqp.ErrUnexpectedFrame) {
			t.Fatalf("ended by %v", why)
		}
	}
}

func TestCancellation(t *testing.T) {
	t.Parallel()
	cancels, deliveries := make(chan string, 1), make(chan amqp.Delivery)
	cancels <- "tag"
	close(deliveries)
	s := listening(t, &channel{conn: &amqpconn.Conn{}, cancels: cancels})
	if _, why := s.dispatch(deliveries); !errors.Is(why, errCancelled) {
		t.Fatalf("ended by %v", why)
	}
}

package amqpconn_test

import (
	"context"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// Errors of a dial are logged, and those of a URL that cannot be parsed quote it.
func TestDialErrorHidesURL(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"amqp://user:sec%ret@localhost/", "amqp://user:sec/ret@localhost/"} {
		_, err := amqpconn.Open(t.Context(), func(context.Context) (*amqp.Connection, error) { return amqp.Dial(url) }, time.Second)
		if err == nil || strings.Contains(err.Error(), "sec") || strings.Contains(err.Error(), "ret") {
			t.Errorf("error %v", err)
		}
	}
}

package amqpconn_test

import (
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// TestDialURLLeavesItsConfigAlone has connections dialled at once with one Config, whose properties
// the client would write to.
func TestDialURLLeavesItsConfigAlone(t *testing.T) {
	t.Parallel()
	properties := amqp.Table{"connection_name": "dialled twice"}
	dial := amqpconn.DialURL(amqptest.New(t).URL, amqp.Config{Properties: properties})
	ended := make(chan error)
	for range 2 {
		go func() {
			conn, err := dial(t.Context())
			if err == nil {
				err = conn.Close()
			}
			ended <- err
		}()
	}
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if len(properties) != 1 {
		t.Errorf("the client wrote to the properties: %v", properties)
	}
}

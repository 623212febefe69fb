package amqpconn_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

func TestRecoveryIsRefused(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	dial := func(context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(b.URL, amqp.Config{Recovery: &amqp.Recovery{}})
	}
	conn, err := amqpconn.Open(t.Context(), dial, testenv.Patience)
	if err == nil || !strings.Contains(err.Error(), "recovery") {
		t.Errorf("connection %v, error %v", conn, err)
	}
}

func TestDialIgnoresContext(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	release := make(chan struct{})
	late := make(chan *amqp.Connection, 1)
	dial := func(context.Context) (*amqp.Connection, error) {
		<-release
		conn, err := amqp.Dial(b.URL)
		late <- conn
		return conn, err
	}
	_, err := amqpconn.Open(t.Context(), dial, 50*time.Millisecond)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v", err)
	}
	close(release)
	conn := <-late
	testenv.Eventually(t, func() error {
		if !conn.IsClosed() {
			return errors.New("the late connection is open")
		}
		return nil
	})
}

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

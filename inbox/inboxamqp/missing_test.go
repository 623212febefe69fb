package inboxamqp_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A consumer without its queue says so, to the log and to Ready, and works once somebody declares it.
func TestMissingQueue(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var log logBuffer
	var got recorder
	c := newConsumer(t, b.Dial, &got, config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	r := start(t, c)
	const want = "call Consumer.Setup"
	testenv.Eventually(t, func() error {
		if err := r.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			return fmt.Errorf("ready: %v", err)
		}
		if !strings.Contains(log.String(), want) {
			return errors.New("the log does not say it")
		}
		return nil
	})
	setUp(t, c)
	b.Publish(t, "", "orders", order())
	got.await(t, 1)
	ready(t, r)
}

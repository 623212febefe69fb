package main_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// TestRelayIsWokenByOtherProcesses sends each message when the one before has arrived: the relay has just looked then,
// and would look again after a second.
func TestRelayIsWokenByOtherProcesses(t *testing.T) {
	t.Parallel()
	const rounds = 20
	broker := amqptest.New(t)
	s := services{pgtest.URL(t), redistest.URL(t), broker.URL}
	api := start(t, s.env(), "-backend=services", "-role=api", "-user-limit=1000")
	start(t, s.env(), "-backend=services", "-role=relay")
	broker.Queue(t, "ear", nil)
	broker.Bind(t, "ear", "reservation.held", "reservation")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":50}`)
	c.hold(newUser(), event, `"quantity":1`)
	broker.Take(t, "ear", 1, patience) // the relay runs, and its listener

	begin := time.Now()
	for range rounds {
		c.hold(newUser(), event, `"quantity":1`)
		broker.Take(t, "ear", 1, patience)
	}
	took := time.Since(begin)
	t.Logf("%v for each", took/rounds)
	if took > rounds*time.Second/2 {
		t.Errorf("%d messages took %v, one after the other: the relay has polled", rounds, took)
	}
}

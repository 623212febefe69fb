package main_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

// TestSweeperIsWokenByOtherProcesses makes each short hold when the one before has expired: the sweeper has just looked
// then, and would look again after a minute.
func TestSweeperIsWokenByOtherProcesses(t *testing.T) {
	t.Parallel()
	const rounds = 5
	s := newServices(t)
	api := start(t, s.env(), "-backend=services", "-role=api", "-hold=1s")
	start(t, s.env(), "-backend=services", "-role=sweeper")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":50}`)
	swept := func(n int) {
		c.hold(newUser(), event, `"quantity":1`)
		testenv.Eventually(t, 2*time.Minute, func() error {
			var expired int
			err := pgxScan(t.Context(), s, &expired, "select count(*) from reservations where status = 'expired'")
			if err == nil && expired < n {
				err = fmt.Errorf("%d of %d holds have expired", expired, n)
			}
			return err
		})
	}
	swept(1) // the sweeper runs, and its listener

	begin := time.Now()
	for n := range rounds {
		swept(n + 2)
	}
	took := time.Since(begin)
	t.Logf("%v for each", took/rounds)
	if took > time.Minute {
		t.Errorf("%d holds of a second took %v, one after the other: the sweeper has polled", rounds, took)
	}
}

package main_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestRelayIsWokenByOtherProcesses sends each message when the one before has arrived: the relay has just looked then,
// and would look again after a second. A busy machine delays most of them, polling all.
func TestRelayIsWokenByOtherProcesses(t *testing.T) {
	t.Parallel()
	const rounds, enough, soon = 200, 5, time.Second / 2
	broker := amqptest.New(t)
	s := services{pgtest.URL(t), redistest.URL(t), broker.URL}
	api := start(t, s.env(), "-backend=services", "-role=api", "-user-limit=1000")
	start(t, s.env(), "-backend=services", "-role=relay")
	broker.Queue(t, "ear", nil)
	broker.Bind(t, "ear", "reservation.held", "reservation")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":500}`)
	c.hold(newUser(), event, `"quantity":1`)
	broker.Take(t, "ear", 1, patience) // the relay runs, and its listener

	var took []time.Duration
	prompt := 0
	for len(took) < rounds && prompt < enough {
		begin := time.Now()
		c.hold(newUser(), event, `"quantity":1`)
		broker.Take(t, "ear", 1, patience)
		took = append(took, time.Since(begin))
		if took[len(took)-1] < soon {
			prompt++
		}
	}
	t.Logf("messages took %v", took)
	if prompt < enough {
		t.Errorf("%d of %d messages took less than %v, one after the other: the relay has polled", prompt, rounds, soon)
	}
}

// TestShortHoldsExpireOnTime leaves the schedule at every half hour. Each hold of two seconds is made when the one
// before has expired: the sweeper has just looked then, and would look again after a minute and a half.
func TestShortHoldsExpireOnTime(t *testing.T) {
	t.Parallel()
	for name, roles := range map[string][]string{"one process": {"all"}, "two processes": {"api", "sweeper"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const rounds = 5
			s := newServices(t)
			var shop *process
			for _, role := range roles {
				p := start(t, s.env(), "-backend=services", "-role="+role, "-hold=2s")
				awaitReady(t, p.url)
				if shop == nil {
					shop = p
				}
			}
			c := newClient(t, shop.url)
			event := c.newEvent(`{"name":"Concert","seats":50}`)
			var late []time.Duration
			for range rounds {
				late = append(late, untilSwept(t, s, c.hold(newUser(), event, `"quantity":1`)))
			}
			t.Logf("late by %v", late)
			if slices.Sort(late); late[rounds/2] > 10*time.Second || late[0] < 0 {
				t.Errorf("holds of two seconds expired late by %v", late)
			}
		})
	}
}

// untilSwept returns how long after its deadline the reservation is seen to be expired in the table.
func untilSwept(t *testing.T, s services, r reservation) (late time.Duration) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var status string
		err := pgxScan(t.Context(), s, &status, "select status from reservations where id = $1", r.ID)
		if late = time.Since(r.ExpiresAt); err == nil && status != "expired" {
			err = fmt.Errorf("%s is %s", r.ID, status)
		}
		return err
	})
	return late
}

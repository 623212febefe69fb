package main_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Each layer does its work unless it is left out: a user with two units sends one request twice, then two others.
func TestWithout(t *testing.T) {
	t.Parallel()
	for without, want := range map[string]string{
		"":                     "answers [201 201 201 429], 2 seats held, 2 messages",
		"limits":               "answers [201 201 201 201], 3 seats held, 3 messages",
		"keys":                 "answers [201 201 429 429], 2 seats held, 2 messages",
		"messages":             "answers [201 201 201 429], 2 seats held, 0 messages",
		"limits,keys,messages": "answers [201 201 201 201], 4 seats held, 0 messages",
	} {
		t.Run(without, func(t *testing.T) {
			t.Parallel()
			s := newServices(t)
			args := []string{"-backend=services", "-role=api", "-user-limit=2"}
			if without != "" {
				args = append(args, "-without="+without)
			}
			c := newClient(t, start(t, s.env(), args...).url)
			event := c.newEvent(`{"name":"Concert","seats":5}`)
			user, again := newUser(), newKey()
			var answers []int
			for _, key := range []string{again, again, newKey(), newKey()} {
				answers = append(answers, c.post(user, key, "/api/reservations", holdBody(event, `"quantity":1`)).status)
			}
			if a := c.post(newUser(), newKey(), "/api/reservations", strings.Repeat(" ", 1<<20+1)); a.status != http.StatusRequestEntityTooLarge {
				t.Errorf("a body of more than 1 MiB: %d", a.status)
			}
			var messages int
			if err := pgxScan(t.Context(), s, &messages, "select count(*) from holdfast_outbox"); err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprintf("answers %v, %d seats held, %d messages", answers, c.seats(event)["held"], messages)
			if got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}

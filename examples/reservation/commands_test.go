package main_test

import (
	"strings"
	"testing"
)

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-backend=memory", "-role=relay"}, {"-role=api"}, {"-backend=memory", "relay"}, {"-backend=floppy"},
		{"-backend=services", "-role=boss"}, {"-hold=x"}, {"-hold=0s"}, {"-hold=-1m"}, {"-sweep=sometimes"}, {"-sweep=@every 1ns"},
		{"-user-limit=0"}, {"-global-limit=-1"}, {"-port=1"}, {"nonsense"}, {"relay", "x"}, {"relay", "--limit=0"},
		{"relay", "--limit=x"}, {"dead"}, {"dead", "raise"}, {"dead", "show"}, {"dead", "retry"}, {"dead", "remove"},
		{"dead", "list", "--id=x"}, {"dead", "list", "--from=x"}, {"sweep", "--now"}, {"-backend=containers", "sweep"},
	} {
		code, out, errs := command(t, nil, args...)
		if code != 2 || out != "" || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "reservation: ") {
			t.Errorf("%q exits with %d, prints %q and %q; want 2 and one line", args, code, out, errs)
		}
	}
	if code, out, _ := command(t, nil, "-h"); code != 0 || !strings.Contains(out, "doctor") {
		t.Errorf("-h exits with %d: %s", code, out)
	}
	if code, out, _ := command(t, nil, "relay", "-h"); code != 0 || !strings.Contains(out, "-time-limit") {
		t.Errorf("relay -h exits with %d: %s", code, out)
	}
}

func TestBadAddressesDoNotShowPasswords(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=mysql://root:secret@localhost/x", "AMQP_URL=amqp://guest:secret@%zz/"}
	code, _, errs := command(t, env, "-backend=services")
	if code != 2 || strings.Contains(errs, "secret") || !strings.Contains(errs, "DATABASE_URL") || !strings.Contains(errs, "AMQP_URL") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestOperatorCommands(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	wants := func(want int, part string, args ...string) {
		t.Helper()
		code, out, errs := command(t, s.env(), args...)
		if code != want || !strings.Contains(out, part) {
			t.Errorf("%q exits with %d, want %d; prints %q, want %q\n%s", args, code, want, out, part, errs)
		}
	}
	wants(1, "does not exist", "doctor")
	wants(2, "", "relay")
	wants(0, "up to date", "migrate")
	wants(0, "up to date", "migrate")
	wants(0, "all is well", "doctor")
	wants(0, "published 0, failed 0", "relay")
	wants(0, "expired 0", "sweep")
	wants(0, "outbox 0, inbox 0, idempotency 0", "prune")
	wants(0, "", "dead", "list")

	api := start(t, s.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":5}`)
	for range 3 {
		c.hold(newUser(), event, `"quantity":1`)
	}
	wants(0, "published 2, failed 0", "relay", "--limit", "2")
	wants(0, "published 1, failed 0", "relay", "--limit=10", "--time-limit=1s")
	api.stop()
}

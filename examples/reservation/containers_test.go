package main_test

import (
	"cmp"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// TestContainers runs the scenario where there is a Docker engine, and elsewhere wants to be told so in one line.
func TestContainers(t *testing.T) {
	t.Parallel()
	shop, listening := launch(t, os.Environ(), "-backend=containers", scenarioHold)
	select {
	case shop.url = <-listening:
		scenario(t, newClient(t, shop.url), inFlightByCrowd)
		shop.stop()
	case <-shop.ended:
		if dockerListens() {
			t.Fatalf("ended before it listened, with Docker there: %v\n%s", shop.err, shop.stderr)
		}
		errs := shop.stderr.String()
		if shop.cmd.ProcessState.ExitCode() != 1 || shop.stdout.String() != "" ||
			strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "needs a Docker engine") {
			t.Errorf("%v, %q, %q; want exit code 1 and one line", shop.err, shop.stdout, errs)
		}
	case <-time.After(6 * time.Minute): // images may have to be pulled first
		t.Fatalf("does not listen\n%s", shop.stderr)
	}
}

func dockerListens() bool {
	network, address, _ := strings.Cut(cmp.Or(os.Getenv("DOCKER_HOST"), "unix:///var/run/docker.sock"), "://")
	conn, err := net.Dial(network, address)
	if err != nil {
		return false
	}
	_ = conn.Close() // nothing was sent
	return true
}

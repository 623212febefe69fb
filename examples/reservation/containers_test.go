package main_test

import (
	"os"
	"strings"
	"testing"
	"time"
)

// dockerIsHere tells whether there may be a Docker engine to start containers with.
func dockerIsHere() bool {
	_, err := os.Stat("/var/run/docker.sock")
	return err == nil || os.Getenv("DOCKER_HOST") != ""
}

func TestContainersWithoutDocker(t *testing.T) {
	t.Parallel()
	if dockerIsHere() {
		t.Skip("there is a Docker engine")
	}
	code, out, errs := command(t, nil, "-backend=containers")
	if code != 1 || out != "" || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "needs a Docker engine") {
		t.Errorf("exit %d, %q, %q; want 1 and one line", code, out, errs)
	}
}

func TestScenarioOnContainers(t *testing.T) {
	t.Parallel()
	if !dockerIsHere() {
		t.Skip("there is no Docker engine")
	}
	shop, listening := launch(t, os.Environ(), "-backend=containers", scenarioHold)
	select {
	case shop.url = <-listening:
	case <-shop.ended:
		t.Fatalf("ended before it listened: %v\n%s", shop.err, shop.stderr)
	case <-time.After(5 * time.Minute): // images may have to be pulled first
		t.Fatalf("does not listen\n%s", shop.stderr)
	}
	scenario(t, newClient(t, shop.url), inFlightByCrowd)
	shop.stop()
}

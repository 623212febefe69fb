package main_test

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestOps_address(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-ops-addr=127.0.0.1:0")
	var ops string
	testenv.Eventually(t, func() error {
		if _, after, ok := strings.Cut(shop.stdout.String(), "operators see "); ok {
			ops, _, _ = strings.Cut(after, "\n")
		}
		if ops == "" {
			return fmt.Errorf("it says %q", shop.stdout)
		}
		return nil
	})
	customer, operator := newClient(t, shop.url), newClient(t, ops)
	awaitReady(t, ops)
	operator.get("/metrics").wants(http.StatusOK, "")
	operator.get("/api/events").wants(http.StatusNotFound, "NOT_FOUND")
	customer.get("/api/events").wants(http.StatusOK, "")
	for _, path := range []string{"/readyz", "/metrics", "/healthz"} {
		customer.get(path).wants(http.StatusNotFound, "NOT_FOUND")
	}
	shop.stop()
}

// The metric by which relays are scaled, and the paths that are probed, are what the shop serves.
func TestDeploy_probes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/kubernetes.yaml")
	noError(t, err)
	shop := start(t, nil)
	c := newClient(t, shop.url)
	for _, match := range regexp.MustCompile(`metric: \{name: ([a-z_]+)\}`).FindAllStringSubmatch(string(text), -1) {
		testenv.Eventually(t, func() error { // once the relay has looked
			if metrics := string(c.get("/metrics").wants(200, "").body); !strings.Contains(metrics, "\n"+match[1]) {
				return fmt.Errorf("/metrics has no %s", match[1])
			}
			return nil
		})
	}
	probed := regexp.MustCompile(`httpGet: \{path: (/[a-z]+)`).FindAllStringSubmatch(string(text), -1)
	for _, match := range probed {
		c.get(match[1]).wants(200, "")
	}
	if len(probed) != 8 {
		t.Errorf("%d probes", len(probed))
	}
	shop.stop()
}

// A signal ends each role while no server answers, on old connections or on new ones. Requests in flight have 20 s, then
// services as long, then connections 2 s: a process without a request or a message in flight waits for its connections only.
func TestSignal_silentServers(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "promises in seconds")
	const exit = time.Second // of a process
	for name, tc := range map[string]struct {
		role  string
		busy  bool
		drain time.Duration
	}{
		"all, busy": {"all", true, 42 * time.Second},
		"api, idle": {"api", false, 2 * time.Second},
		"relay":     {"relay", false, 22 * time.Second},
		"consumer":  {"consumer", false, 22 * time.Second},
		"sweeper":   {"sweeper", false, 22 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newServices(t)
			api := start(t, direct.env(), "-backend=services", "-role=api", "-hold=1s", "-user-limit=1000")
			postgres, redis, rabbit := testenv.NewProxy(t, direct.databaseURL), testenv.NewProxy(t, direct.redisURL), testenv.NewProxy(t, direct.amqpURL)
			s := services{postgres.URL(), redis.URL(), rabbit.URL()}
			p := start(t, s.env(), "-backend=services", "-role="+tc.role, "-hold=1s", "-sweep=@every 1s")
			awaitReady(t, p.url)
			c := newClient(t, api.url)
			event := c.newEvent(`{"name":"Concert","seats":50}`)
			c.hold(newUser(), event, `"quantity":1`)
			for _, proxy := range []*testenv.Proxy{postgres, redis, rabbit} {
				proxy.SilenceConnections()
				proxy.Pause()
			}
			if tc.busy {
				mine := newClient(t, p.url)
				go func() { _, _ = mine.tryPost(newUser(), newKey(), "/api/reservations", holdBody(event, `"quantity":1`)) }()
			}
			c.hold(newUser(), event, `"quantity":1`) // there is work for a relay, a consumer and a sweeper
			awaitUnready(t, p.url)
			began := time.Now()
			p.stop()
			if took := time.Since(began); took > tc.drain+exit {
				t.Errorf("ended after %v, want %v", took, tc.drain)
			}
		})
	}
}

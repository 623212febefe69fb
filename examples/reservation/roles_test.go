package main_test

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

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

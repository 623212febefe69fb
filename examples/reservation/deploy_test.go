package main_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The metric by which relays are scaled, and the paths that are probed, are what the shop serves.
func TestDeployedProbes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/kubernetes.yaml")
	if err != nil {
		t.Fatal(err)
	}
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

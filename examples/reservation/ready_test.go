package main_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestOpsAddress(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-ops-addr=127.0.0.1:0")
	var ops string
	testenv.Eventually(t, patience, func() error {
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

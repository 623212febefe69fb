package observability

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
)

// startShop runs a shop in which holds soon expire.
func startShop(t *testing.T, env []string, flags ...string) *shop.Process {
	t.Helper()
	return shop.Start(t, env, append([]string{"-hold=1s", "-sweep=@every 1s", "-user-limit=20"}, flags...)...)
}

// load has users hold seats, each request twice, until ctx ends. What they do not confirm expires.
func load(ctx context.Context, address string) {
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	post := func(user, path, body string) (answer []byte) {
		key := string(idempotency.NewKey())
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, address+path, strings.NewReader(body))
			if err != nil {
				return nil
			}
			req.Header.Set("X-Mock-User-Id", user)
			req.Header.Set("Idempotency-Key", key)
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				return nil
			}
			answer, _ = io.ReadAll(resp.Body) // half an answer is none
			_ = resp.Body.Close()
		}
		return answer
	}
	rest := func() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	for user := 0; ctx.Err() == nil; user++ {
		rest()
		var event struct{ ID string }
		name := fmt.Sprint("user-", user)
		if json.Unmarshal(post(name, "/api/events", `{"name":"Concert","seats":50}`), &event) != nil {
			continue
		}
		for range 15 {
			post(name, "/api/reservations", `{"event_id":"`+event.ID+`","quantity":1}`)
			rest()
		}
	}
}

package faults_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
)

// outcomes is what the relays of this process tell of.
type outcomes struct {
	mu     sync.Mutex
	taken  []uuid.UUID // since the mark
	failed map[outbox.Class]int
	paused map[outbox.Class]int
}

func newOutcomes() *outcomes {
	return &outcomes{failed: map[outbox.Class]int{}, paused: map[outbox.Class]int{}}
}

func (o *outcomes) hooks() outbox.Hooks {
	return outbox.Hooks{
		OnPublished: func(_ context.Context, m outbox.Message) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.taken = append(o.taken, m.ID)
		},
		OnFailed: func(_ context.Context, _ outbox.Message, f outbox.Failure) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.failed[f.Class]++
		},
		OnPause: func(_ context.Context, _ string, err error) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.paused[outbox.ClassOf(err)]++
		},
	}
}

// mark begins what published returns.
func (o *outcomes) mark() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.taken = nil
}

func (o *outcomes) published() []uuid.UUID {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.taken)
}

func (o *outcomes) failures(c outbox.Class) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failed[c]
}

func (o *outcomes) pauses(c outbox.Class) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.paused[c]
}

// start runs the relay in this process until end is called.
func (j relayJob) start(t testing.TB) (end func()) {
	t.Helper()
	return beside(t, func(ctx context.Context) error {
		_, err := j.run(ctx, func() {})
		return err
	})
}

// closeConnections has the management API close every connection of the broker.
func closeConnections(t testing.TB, admin string) {
	t.Helper()
	var open []struct{ Name string }
	request(t, http.MethodGet, admin+"/api/connections", &open)
	for _, c := range open {
		request(t, http.MethodDelete, admin+"/api/connections/"+url.PathEscape(c.Name), nil)
	}
}

// request calls the management API. Not found is no fault: a connection may be gone by itself.
func request(t testing.TB, method, address string, answer any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, address, nil)
	must(t, err)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotFound:
	case resp.StatusCode >= http.StatusMultipleChoices:
		t.Fatalf("%s %s: %s", method, req.URL.Path, resp.Status)
	case answer != nil:
		must(t, json.NewDecoder(resp.Body).Decode(answer))
	}
}

package faults_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// outcomes is what the relays of this process tell of.
type outcomes struct {
	mu     sync.Mutex
	now    string               // what happens
	taken  map[uuid.UUID]string // what happened when the relay had a message published
	failed map[driver.Class]int
	paused map[driver.Class]int
}

func newOutcomes() *outcomes {
	return &outcomes{taken: map[uuid.UUID]string{}, failed: map[driver.Class]int{}, paused: map[driver.Class]int{}}
}

func (o *outcomes) hooks() outbox.Hooks {
	return outbox.Hooks{
		OnPublished: func(_ context.Context, m driver.Message) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.taken[m.ID] = o.now
		},
		OnFailed: func(_ context.Context, _ driver.Message, f outbox.Failure) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.failed[f.Class]++
		},
		OnPause: func(_ context.Context, _ string, err error) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.paused[driver.ClassOf(err)]++
		},
	}
}

// during has later messages noted as published in the meantime of what.
func (o *outcomes) during(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.now = what
}

// published are the messages noted so.
func (o *outcomes) published(during string) []uuid.UUID {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ids []uuid.UUID
	for id, what := range o.taken {
		if what == during {
			ids = append(ids, id)
		}
	}
	return ids
}

// tell says when the messages that are lost were published.
func (o *outcomes) tell(t testing.TB, lost []uuid.UUID) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	when := map[string]int{}
	for _, id := range lost {
		when[o.taken[id]]++
	}
	if len(lost) > 0 {
		t.Logf("the lost were published during: %v", when)
	}
}

func (o *outcomes) failures(c driver.Class) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failed[c]
}

func (o *outcomes) pauses(c driver.Class) int {
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

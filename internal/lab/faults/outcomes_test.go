package faults_test

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// outcomes are the answers of the broker to the relays of this process, by message.
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

// note takes the broker's answer to a message.
func (o *outcomes) note(m driver.Message, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch class := driver.ClassOf(err); {
	case err == nil:
		o.taken[m.ID] = o.now
	case class == driver.Unavailable || class == driver.Blocked:
		o.paused[class]++
	default:
		o.failed[class]++
	}
}

// watched is a publisher that tells of the answers.
type watched struct {
	*outboxamqp.Publisher
	outcomes *outcomes
}

func (w watched) Publish(ctx context.Context, m driver.Message, done func(error)) {
	w.Publisher.Publish(ctx, m, func(err error) {
		w.outcomes.note(m, err)
		done(err)
	})
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
	must(t, testenv.Admin(t.Context(), admin, http.MethodGet, "/api/connections", nil, &open))
	for _, c := range open {
		// One that ended by itself meanwhile answers 404.
		_ = testenv.Admin(t.Context(), admin, http.MethodDelete, "/api/connections/"+url.PathEscape(c.Name), nil, nil)
	}
}

package outboxpgx_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// What waits is listed as it was stored, also behind a parked message of its key; what is parked by the
// time when it is due.
func TestWaiting(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	publisher.Respond(func(m driver.Message) error {
		return &driver.PublishError{Class: driver.Unroutable, Err: errors.New("no place for " + m.Name)}
	})
	f.write(t, outbox.Message{Name: "failed", Key: "k", Body: []byte("1"), Headers: map[string]string{"h": "1"}})
	retry := outbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}
	relay := f.relay(t, publisher, outbox.RelayConfig{Retry: retry})
	_, err := relay.Drain(t.Context(), outbox.Bounds{})
	must(t, err)
	f.write(t, outbox.Message{Name: "later", Body: []byte("2"), NotBefore: time.Now().Add(24 * time.Hour)})
	f.write(t, outbox.Message{Name: "follows", Key: "k", Body: []byte("3")})
	_, err = relay.Drain(t.Context(), outbox.Bounds{}) // holds it behind the first of its key
	must(t, err)
	f.write(t, outbox.Message{Name: "ready", Body: []byte("4")})
	_, err = f.pool.Exec(t.Context(), `INSERT INTO holdfast_outbox (id, lane, name, body, content_type, headers) VALUES (gen_random_uuid(), 1, 'foreign', '5', 'text/plain', '[1]')`)
	must(t, err)

	for _, tc := range []struct {
		filter outbox.WaitingFilter
		want   []string
	}{
		{outbox.WaitingFilter{}, []string{"follows", "ready", "foreign"}},
		{outbox.WaitingFilter{Limit: 2}, []string{"follows", "ready"}},
		{outbox.WaitingFilter{Key: "k"}, []string{"follows"}},
		{outbox.WaitingFilter{Name: "ready"}, []string{"ready"}},
		{outbox.WaitingFilter{Parked: true}, []string{"failed", "later"}},
		{outbox.WaitingFilter{Parked: true, Key: "k"}, []string{"failed"}},
		{outbox.WaitingFilter{Parked: true, Limit: 1}, []string{"failed"}},
		{outbox.WaitingFilter{Parked: true, Name: "ready"}, nil},
	} {
		found, err := f.store.Waiting(t.Context(), tc.filter)
		must(t, err)
		var got []string
		for _, w := range found {
			got = append(got, w.Name)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.filter, got, tc.want)
		}
	}
	parked, err := f.store.Waiting(t.Context(), outbox.WaitingFilter{Parked: true})
	must(t, err)
	if w := parked[0]; w.Key != "k" || string(w.Body) != "1" || w.Headers["h"] != "1" || w.Attempts != 1 || w.Class != string(driver.Unroutable) ||
		w.Error != "outbox: publish: unroutable: no place for failed" || time.Until(w.DueAt) < 30*time.Minute || w.CreatedAt.IsZero() || w.Unreadable != nil {
		t.Errorf("%+v", w)
	}
	ready, err := f.store.Waiting(t.Context(), outbox.WaitingFilter{})
	must(t, err)
	if !ready[0].DueAt.IsZero() || ready[2].Unreadable == nil {
		t.Errorf("%+v", ready)
	}
	for _, bad := range []outbox.WaitingFilter{{Limit: -1}, {Name: fmt.Sprintf("%01001d", 0)}} {
		if _, err := f.store.Waiting(t.Context(), bad); err == nil {
			t.Errorf("%.60v was accepted", bad)
		}
	}
}

package outboxpgx_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestChangesOfDeadLettersAreAudited(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	to := &outboxpgx.Destination{Transport: "audit", Route: outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}}
	retried := outboxpgx.Filter{IDs: []uuid.UUID{ids["a"]}, Class: driver.Permanent, Name: "a", Key: "ka", Error: "no place", OlderThan: time.Microsecond, Limit: 7}
	removed := outboxpgx.Filter{Name: "b"}
	n, err := f.dead.Retry(t.Context(), retried, outboxpgx.RetryOptions{By: "ada", Reason: "the exchange is back", To: to})
	must(t, err)
	m, err := f.dead.Remove(t.Context(), removed, outboxpgx.RemoveOptions{By: "bob"})
	must(t, err)
	nothing, err := f.dead.Remove(t.Context(), removed, outboxpgx.RemoveOptions{By: "bob"})
	must(t, err)
	if n != 1 || m != 1 || nothing != 0 {
		t.Errorf("changed %d, %d and %d", n, m, nothing)
	}
	got, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	want := []outboxpgx.AuditEntry{
		{By: "bob", Action: "remove", Count: 1, Filter: removed},
		{By: "ada", Reason: "the exchange is back", Action: "retry", Count: 1, Filter: retried, To: to},
	}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i := range got {
		if age := time.Since(got[i].At); age < -time.Minute || age > time.Minute {
			t.Errorf("entry %d is of %v", i, got[i].At)
		}
		got[i].At = time.Time{}
		if line := fmt.Sprintf("%+v %+v", got[i], got[i].To); got[i].To == nil && line != fmt.Sprintf("%+v %+v", want[i], want[i].To) {
			t.Errorf("entry %d: %s", i, line)
		}
	}
	if e := got[1]; fmt.Sprint(e.Filter) != fmt.Sprint(retried) || e.Reason != want[1].Reason || fmt.Sprint(*e.To) != fmt.Sprint(*to) {
		t.Errorf("%+v to %+v", e, e.To)
	}
	newest, err := f.store.Audit(t.Context(), 1)
	must(t, err)
	if len(newest) != 1 || newest[0].By != "bob" {
		t.Errorf("the newest: %+v", newest)
	}
	if _, err := f.store.Audit(t.Context(), -1); err == nil {
		t.Error("a negative limit was accepted")
	}
}

func TestChangesNeedAnActor(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	for name, o := range map[string]outboxpgx.RemoveOptions{
		"nobody":       {},
		"long name":    {By: strings.Repeat("x", 129)},
		"control":      {By: "a\nb"},
		"not UTF-8":    {By: "a\xff"},
		"long reason":  {By: "ada", Reason: strings.Repeat("x", 1001)},
		"reason, ctrl": {By: "ada", Reason: "\x00"},
	} {
		if _, err := f.dead.Remove(t.Context(), outboxpgx.Filter{}, o); err == nil {
			t.Errorf("%s: removed", name)
		}
		if _, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: o.By, Reason: o.Reason}); err == nil {
			t.Errorf("%s: retried", name)
		}
	}
	n, err := f.dead.Count(t.Context(), outboxpgx.Filter{})
	must(t, err)
	entries, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	if n != 3 || len(entries) != 0 {
		t.Errorf("%d letters left, %d entries", n, len(entries))
	}
}

// An entry commits with its change or not at all.
func TestAuditFailsWithItsChange(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	_, err := f.pool.Exec(t.Context(), `ALTER TABLE holdfast_outbox_audit ADD CHECK (actor <> 'eve')`)
	must(t, err)
	if _, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "eve"}); err == nil {
		t.Error("retried without a note")
	}
	n, err := f.dead.Count(t.Context(), outboxpgx.Filter{})
	must(t, err)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if n != 3 || stats.Ready != 0 {
		t.Errorf("%d letters, %+v", n, stats)
	}
}

// Every letter is retried once and noted once, however many ask for it at the same time.
func TestRetriesAtOnce(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, byAda); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	entries, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	var sum int64
	for _, e := range entries {
		sum += e.Count
	}
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if sum != 3 || stats.Ready != 3 || stats.Dead != 0 {
		t.Errorf("%d in %d entries, %+v", sum, len(entries), stats)
	}
}

func TestPruneForgetsOldAuditEntries(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	for _, name := range []string{"a", "b"} {
		_, err := f.dead.Remove(t.Context(), outboxpgx.Filter{IDs: []uuid.UUID{ids[name]}}, outboxpgx.RemoveOptions{By: name})
		must(t, err)
	}
	_, err := f.pool.Exec(t.Context(), `UPDATE holdfast_outbox_audit SET at = at - CASE actor WHEN 'a' THEN interval '366 days' ELSE interval '364 days' END`)
	must(t, err)
	_, err = f.store.Prune(t.Context())
	must(t, err)
	entries, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	if len(entries) != 1 || entries[0].By != "b" {
		t.Errorf("%+v", entries)
	}
}

// What came back keeps the stored order, whatever order it died in, behind what is there and before
// what comes later.
func TestRetryKeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	for name, spread := range map[string]time.Duration{"at once": 0, "spread": 30 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			refuse := outboxtest.NewPublisher()
			refuse.Respond(func(driver.Message) error { return &driver.PublishError{Class: driver.Permanent} })
			message := func(name string) outbox.Message { return outbox.Message{Name: name, Key: "k", Body: []byte("1")} }
			f.write(t, message("m1"), message("m2"), message("m3"))
			_, err := f.relay(t, refuse, outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{})
			must(t, err)
			_, err = f.pool.Exec(t.Context(), `UPDATE holdfast_outbox_dead SET died_at = died_at - seq * interval '1 minute'`)
			must(t, err)
			f.write(t, message("before"))
			n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "ada", Spread: spread})
			must(t, err)
			f.write(t, message("after"))
			publisher := outboxtest.NewPublisher()
			_, err = f.relay(t, publisher, outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{Limit: 5, TimeLimit: 10 * time.Second})
			must(t, err)
			var got []string
			for _, m := range publisher.Received() {
				got = append(got, m.Name)
			}
			if want := []string{"before", "m1", "m2", "m3", "after"}; n != 3 || !slices.Equal(got, want) {
				t.Errorf("%d retried, published %v, want %v", n, got, want)
			}
		})
	}
}

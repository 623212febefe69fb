package outboxpgx_test

import (
	"fmt"
	"slices"
	"strings"
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
	replayed := outbox.Filter{
		IDs: []uuid.UUID{ids["a"]}, Class: string(driver.Permanent), Name: "a", Key: "ka", ErrorContains: "no place",
		FailedAfter: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), FailedBefore: time.Date(2200, 1, 2, 3, 4, 5, 0, time.UTC), Limit: 7,
	}
	removed := outbox.Filter{Name: "b"}
	n, err := f.dead.Replay(t.Context(), replayed, outbox.Replay{By: "ada", Reason: "the exchange is back"})
	must(t, err)
	m, err := f.dead.Remove(t.Context(), removed, outbox.Removal{By: "bob"})
	must(t, err)
	nothing, err := f.dead.Remove(t.Context(), removed, outbox.Removal{By: "bob"})
	must(t, err)
	if n.Returned != 1 || m != 1 || nothing != 0 {
		t.Errorf("changed %+v, %d and %d", n, m, nothing)
	}
	got, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	want := []outboxpgx.AuditEntry{
		{By: "bob", Action: "remove", Count: 1, Filter: removed},
		{By: "ada", Reason: "the exchange is back", Action: "replay", Count: 1, Filter: replayed},
	}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i := range got {
		if age := time.Since(got[i].At); age < -time.Minute || age > time.Minute {
			t.Errorf("entry %d is of %v", i, got[i].At)
		}
		got[i].At = time.Time{}
		if line := fmt.Sprintf("%+v", got[i]); line != fmt.Sprintf("%+v", want[i]) {
			t.Errorf("entry %d: %s, want %+v", i, line, want[i])
		}
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
	for name, o := range map[string]outbox.Replay{
		"nobody":       {},
		"long name":    {By: strings.Repeat("x", 129)},
		"control":      {By: "a\nb"},
		"not UTF-8":    {By: "a\xff"},
		"long reason":  {By: "ada", Reason: strings.Repeat("x", 1001)},
		"reason, ctrl": {By: "ada", Reason: "\x00"},
	} {
		if _, err := f.dead.Remove(t.Context(), outbox.Filter{}, outbox.Removal{By: o.By, Reason: o.Reason}); err == nil {
			t.Errorf("%s: removed", name)
		}
		if _, err := f.dead.Replay(t.Context(), outbox.Filter{}, o); err == nil {
			t.Errorf("%s: replayed", name)
		}
	}
	n, err := f.dead.Count(t.Context(), outbox.Filter{})
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
	f.exec(t, `ALTER TABLE holdfast_outbox_audit ADD CHECK (actor <> 'eve')`)
	if _, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "eve"}); err == nil {
		t.Error("retried without a note")
	}
	n, err := f.dead.Count(t.Context(), outbox.Filter{})
	must(t, err)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if n != 3 || stats.Ready != 0 {
		t.Errorf("%d letters, %+v", n, stats)
	}
}

func TestPruneForgetsOldAuditEntries(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	for _, name := range []string{"a", "b"} {
		_, err := f.dead.Remove(t.Context(), outbox.Filter{IDs: []uuid.UUID{ids[name]}}, outbox.Removal{By: name})
		must(t, err)
	}
	f.exec(t, `UPDATE holdfast_outbox_audit SET at = at - CASE actor WHEN 'a' THEN interval '366 days' ELSE interval '364 days' END`)
	_, err := f.store.Prune(t.Context())
	must(t, err)
	entries, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	if len(entries) != 1 || entries[0].By != "b" {
		t.Errorf("%+v", entries)
	}
}

// What came back keeps the stored order, whatever order it died in, behind what is there and before
// what comes later.
func TestReplayKeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	for name, perSecond := range map[string]float64{"at once": 0, "at a rate": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			message := func(name string) outbox.Message { return outbox.Message{Name: name, Key: "k", Body: []byte("1")} }
			f.write(t, message("m1"), message("m2"), message("m3"))
			drainAll(t, f.burying(t, func(driver.Message) error { return &driver.PublishError{Class: driver.Permanent} }))
			f.exec(t, `UPDATE holdfast_outbox_dead SET died_at = died_at - seq * interval '1 minute'`)
			f.write(t, message("before"))
			n, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada", PerSecond: perSecond})
			must(t, err)
			f.write(t, message("after"))
			publisher := outboxtest.NewPublisher()
			_, err = f.relay(t, publisher, outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{Limit: 5, TimeLimit: 10 * time.Second})
			must(t, err)
			var got []string
			for _, m := range publisher.Received() {
				if got = append(got, m.Name); m.Attempts != 0 {
					t.Errorf("%s has %d attempts", m.Name, m.Attempts)
				}
			}
			if want := []string{"before", "m1", "m2", "m3", "after"}; n.Returned != 3 || !slices.Equal(got, want) {
				t.Errorf("%+v, published %v, want %v", n, got, want)
			}
		})
	}
}

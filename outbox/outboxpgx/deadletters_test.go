package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

var byAda = outboxpgx.RetryOptions{By: "ada"}

// withDeadLetters has three: names a, b, c, keys ka, kb, kc; b died of unroutable, the others of
// permanent failures.
func withDeadLetters(t *testing.T) (*fixture, map[string]uuid.UUID) {
	t.Helper()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	publisher.Respond(func(m driver.Message) error {
		class := driver.Permanent
		if m.Name == "b" {
			class = driver.Unroutable
		}
		return &driver.PublishError{Class: class, Err: errors.New("no place for " + m.Name)}
	})
	relay := f.relay(t, publisher, outbox.RelayConfig{Policy: outbox.Policy{MaxAttempts: 1}})
	ids := map[string]uuid.UUID{}
	for _, name := range []string{"a", "b", "c"} {
		f.write(t, outbox.Message{Name: name, Key: "k" + name, Body: []byte("1"), Headers: map[string]string{"h": name}})
		_, err := relay.Drain(t.Context(), outbox.Bounds{})
		must(t, err)
	}
	letters, err := f.dead.List(t.Context(), outboxpgx.Filter{})
	must(t, err)
	if len(letters) != 3 {
		t.Fatalf("%d dead letters", len(letters))
	}
	for _, l := range letters {
		ids[l.Name] = l.ID
	}
	return f, ids
}

func TestDeadLetterFilters(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	for name, tc := range map[string]struct {
		filter outboxpgx.Filter
		want   []string
	}{
		"all":       {outboxpgx.Filter{}, []string{"a", "b", "c"}},
		"class":     {outboxpgx.Filter{Class: driver.Unroutable}, []string{"b"}},
		"name":      {outboxpgx.Filter{Name: "c"}, []string{"c"}},
		"key":       {outboxpgx.Filter{Key: "ka"}, []string{"a"}},
		"ids":       {outboxpgx.Filter{IDs: []uuid.UUID{ids["a"], ids["c"]}}, []string{"a", "c"}},
		"no ids":    {outboxpgx.Filter{IDs: []uuid.UUID{}}, nil},
		"limit":     {outboxpgx.Filter{Limit: 2}, []string{"a", "b"}},
		"age":       {outboxpgx.Filter{OlderThan: time.Hour}, nil},
		"age met":   {outboxpgx.Filter{OlderThan: time.Microsecond}, []string{"a", "b", "c"}},
		"both":      {outboxpgx.Filter{Class: driver.Permanent, Name: "a"}, []string{"a"}},
		"error":     {outboxpgx.Filter{Error: "place for c"}, []string{"c"}},
		"pattern":   {outboxpgx.Filter{Error: "place%"}, nil},
		"no letter": {outboxpgx.Filter{Class: driver.Permanent, Name: "b"}, nil},
	} {
		letters, err := f.dead.List(t.Context(), tc.filter)
		must(t, err)
		var got []string
		for _, l := range letters {
			got = append(got, l.Name)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		n, err := f.dead.Count(t.Context(), tc.filter)
		must(t, err)
		if n != int64(len(tc.want)) {
			t.Errorf("%s: counted %d, want %d", name, n, len(tc.want))
		}
	}
	for _, bad := range []outboxpgx.Filter{{Limit: -1}, {OlderThan: -1}, {IDs: make([]uuid.UUID, 10_001)}, {Error: strings.Repeat("x", 1001)}} {
		if _, err := f.dead.Remove(t.Context(), bad, outboxpgx.RemoveOptions{By: "ada"}); err == nil {
			t.Errorf("%.100v was accepted", bad)
		}
	}
}

func TestDeadLetterShow(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	l, err := f.dead.Show(t.Context(), ids["b"])
	must(t, err)
	if l.Name != "b" || l.Key != "kb" || l.Headers["h"] != "b" || string(l.Body) != "1" || l.Attempts != 1 ||
		l.Class != driver.Unroutable || l.Err != "outbox: publish: unroutable: no place for b" || l.DiedAt.IsZero() {
		t.Errorf("%+v", l)
	}
	if _, err := f.dead.Show(t.Context(), uuid.New()); !errors.Is(err, outboxpgx.ErrNotFound) {
		t.Errorf("an unknown id: %v", err)
	}
}

func TestDeadLetterRetryReentersAtTheTail(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	f.write(t, outbox.Message{Name: "later", Key: "ka", Body: []byte("2")})
	n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{Class: driver.Permanent}, byAda)
	must(t, err)
	if n != 2 {
		t.Errorf("%d moved, want 2", n)
	}
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 3)
	var key []string
	for _, m := range publisher.Received() {
		if m.Attempts != 0 {
			t.Errorf("%s has %d attempts", m.Name, m.Attempts)
		}
		if m.Key == "ka" {
			key = append(key, m.Name)
		}
	}
	if !slices.Equal(key, []string{"later", "a"}) {
		t.Errorf("the key went out as %v", key)
	}
	letters, err := f.dead.List(t.Context(), outboxpgx.Filter{})
	must(t, err)
	if len(letters) != 1 || letters[0].Name != "b" {
		t.Errorf("left: %+v", letters)
	}
}

// A letter whose id was written again neither doubles the message nor stops the other letters.
func TestDeadLetterRetryLeavesWhatIsThereAgain(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	f.write(t, outbox.Message{ID: ids["b"], Name: "b", Body: []byte("1")})
	n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, byAda)
	must(t, err)
	letters, err := f.dead.List(t.Context(), outboxpgx.Filter{})
	must(t, err)
	if n != 2 || len(letters) != 1 || letters[0].ID != ids["b"] {
		t.Errorf("%d moved, left %+v", n, letters)
	}
}

func TestDeadLetterRemove(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	n, err := f.dead.Remove(t.Context(), outboxpgx.Filter{IDs: []uuid.UUID{ids["a"]}}, outboxpgx.RemoveOptions{By: "ada"})
	must(t, err)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if n != 1 || stats.Dead != 2 {
		t.Errorf("%d removed, %+v", n, stats)
	}
}

func TestRetentionAndPrune(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{Retention: time.Hour})
	f.write(t, keyed(10, 150)...)
	report, err := f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{Limit: 2000})
	must(t, err)
	if report.Published != 1500 {
		t.Fatalf("%+v", report)
	}
	kept := func() (n int) {
		must(t, f.pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox WHERE published_at IS NOT NULL`).Scan(&n))
		return n
	}
	n, err := f.store.Prune(t.Context())
	must(t, err)
	if n != 0 || kept() != 1500 {
		t.Errorf("%d pruned too early, %d kept", n, kept())
	}
	_, err = f.pool.Exec(t.Context(), `UPDATE holdfast_outbox SET published_at = published_at - interval '2 hours' WHERE seq % 10 <> 0`)
	must(t, err)
	f.write(t, outbox.Message{Name: "new", Body: []byte("1")})
	n, err = f.store.Prune(t.Context())
	must(t, err)
	if n != 1350 || kept() != 150 {
		t.Errorf("%d pruned, %d kept", n, kept())
	}
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Ready != 1 || stats.OldestAge <= 0 || stats.OldestAge > time.Minute {
		t.Errorf("%+v", stats)
	}
}

func TestBatchIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.Claims(driver.Lanes, 1<<20)
	big := make([]byte, 400<<10)
	for i := range 10 {
		f.write(t, outbox.Message{Name: "blob", ContentType: "application/octet-stream", Key: fmt.Sprint(i), Body: big})
	}
	batch, err := f.store.Claim(context.WithoutCancel(t.Context()), driver.Claim{Limit: 100, Lease: time.Minute})
	must(t, err)
	if n := len(batch.Messages); n != 3 { // the third begins below the bound
		t.Errorf("%d messages of 400 KiB in a batch of 1 MiB", n)
	}
	_, err = f.store.Settle(t.Context(), batch, nil)
	must(t, err)
	report, err := f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{})
	must(t, err)
	if report.Published != 10 {
		t.Errorf("%+v", report)
	}
}

func TestRetryElsewhere(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	to := &outboxpgx.Destination{Transport: "audit", Route: outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}}
	n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{Name: "a"}, outboxpgx.RetryOptions{By: "ada", To: to})
	must(t, err)
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	if n != 1 || len(batch.Messages) != 1 {
		t.Fatalf("%d retried, %d claimed", n, len(batch.Messages))
	}
	m := batch.Messages[0]
	if m.ID != ids["a"] || m.Transport != to.Transport || m.Exchange != to.Route.Exchange || m.RoutingKey != to.Route.RoutingKey || m.Headers["h"] != "a" {
		t.Errorf("retried as %+v", m)
	}
	var refused *outbox.MessageError
	_, err = f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "ada", To: &outboxpgx.Destination{Transport: "ä"}})
	if !errors.As(err, &refused) {
		t.Errorf("a bad transport: %v", err)
	}
	if _, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "ada", Spread: -1}); err == nil {
		t.Error("a negative spread was accepted")
	}
	if left, err := f.dead.Count(t.Context(), outboxpgx.Filter{}); err != nil || left != 2 {
		t.Errorf("%d letters left, %v", left, err)
	}
}

func TestRetrySpread(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "ada", Spread: 3 * time.Hour})
	must(t, err)
	rows, _ := f.pool.Query(t.Context(), `
		SELECT name || round(extract(epoch FROM due_at - min(due_at) OVER ()) / 60) FROM holdfast_outbox ORDER BY due_at`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string]) // the error of Query too
	must(t, err)
	if want := []string{"a0", "b60", "c120"}; n != 3 || !slices.Equal(got, want) {
		t.Errorf("%d retried, minutes %v, want %v", n, got, want)
	}
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 1)
	if got := publisher.Received(); len(got) != 1 || got[0].Name != "a" {
		t.Errorf("received %+v", got)
	}
}

// A letter may have been published after all. One that consumers may have forgotten stays, unless it is
// forced; the others go.
func TestRetryRefusesTheOutlived(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	_, err := f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error, died_at)
		SELECT gen_random_uuid(), n, 0, 'a', '1', 'application/json', '', '', '', now() - n * interval '1 day', 1, 'quarantined', 'lost', now() - n * interval '1 hour'
		FROM generate_series(4, 10) n`)
	must(t, err)
	const day = 24 * time.Hour
	for i, c := range []struct {
		limit   int
		options outboxpgx.RetryOptions
		want    int64
		refused bool
	}{
		{1, outboxpgx.RetryOptions{}, 1, true}, // the oldest that may go, of 7 days
		{0, outboxpgx.RetryOptions{Retention: 5*day + time.Hour}, 2, true},
		{0, outboxpgx.RetryOptions{}, 1, true},
		{0, outboxpgx.RetryOptions{}, 0, true},
		{1, outboxpgx.RetryOptions{Force: true}, 1, false},
		{0, outboxpgx.RetryOptions{Retention: 30 * day}, 2, false},
		{0, outboxpgx.RetryOptions{}, 0, false},
	} {
		c.options.By = "me"
		n, err := f.dead.Retry(t.Context(), outboxpgx.Filter{Limit: c.limit}, c.options)
		if n != c.want || errors.Is(err, outboxpgx.ErrOutlived) != c.refused || !c.refused && err != nil {
			t.Errorf("call %d: retried %d, %v; want %d, refused %v", i, n, err, c.want, c.refused)
		}
	}
	if _, err := f.dead.Retry(t.Context(), outboxpgx.Filter{}, outboxpgx.RetryOptions{By: "me", Retention: -1}); err == nil {
		t.Error("a negative retention was accepted")
	}
}

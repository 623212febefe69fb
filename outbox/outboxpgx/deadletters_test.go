package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math"
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

var byAda = outbox.Replay{By: "ada"}

// givingUp returns a relay whose publisher responds with respond, and for which each failure is the last attempt.
func (f *fixture) givingUp(t *testing.T, respond func(driver.Message) error) *outbox.Relay {
	t.Helper()
	publisher := outboxtest.NewPublisher()
	publisher.Respond(respond)
	return f.relay(t, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}})
}

// withDeadLetters creates three dead letters: names a, b, c, keys ka, kb, kc. The failure of b is unroutable, the
// others are permanent.
func withDeadLetters(t *testing.T) (*fixture, map[string]uuid.UUID) {
	t.Helper()
	f := setup(t, outboxpgx.Config{})
	relay := f.givingUp(t, func(m driver.Message) error {
		class := driver.Permanent
		if m.Name == "b" {
			class = driver.Unroutable
		}
		return &driver.PublishError{Class: class, Err: errors.New("no place for " + m.Name)}
	})
	for _, name := range []string{"a", "b", "c"} {
		f.write(t, outbox.Message{Name: name, Key: "k" + name, Body: []byte("1"), Headers: map[string]string{"h": name}})
		drainAll(t, relay)
	}
	letters, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	if len(letters) != 3 {
		t.Fatalf("%d dead letters", len(letters))
	}
	ids := map[string]uuid.UUID{}
	for _, l := range letters {
		ids[l.Message.Name] = l.Message.ID
	}
	return f, ids
}

func TestDeadLetterFilters(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	for name, tc := range map[string]struct {
		filter outbox.Filter
		want   []string
	}{
		"all":       {outbox.Filter{}, []string{"a", "b", "c"}},
		"class":     {outbox.Filter{Class: string(driver.Unroutable)}, []string{"b"}},
		"name":      {outbox.Filter{Name: "c"}, []string{"c"}},
		"key":       {outbox.Filter{Key: "ka"}, []string{"a"}},
		"ids":       {outbox.Filter{IDs: []uuid.UUID{ids["a"], ids["c"]}}, []string{"a", "c"}},
		"no ids":    {outbox.Filter{IDs: []uuid.UUID{}}, nil},
		"limit":     {outbox.Filter{Limit: 2}, []string{"a", "b"}},
		"age":       {outbox.Filter{FailedBefore: time.Now().Add(-time.Hour)}, nil},
		"age met":   {outbox.Filter{FailedAfter: time.Now().Add(-time.Hour), FailedBefore: time.Now().Add(time.Hour)}, []string{"a", "b", "c"}},
		"too late":  {outbox.Filter{FailedAfter: time.Now().Add(time.Hour)}, nil},
		"both":      {outbox.Filter{Class: string(driver.Permanent), Name: "a"}, []string{"a"}},
		"error":     {outbox.Filter{ErrorContains: "PLACE for C"}, []string{"c"}},
		"pattern":   {outbox.Filter{ErrorContains: "place%"}, nil},
		"no letter": {outbox.Filter{Class: string(driver.Permanent), Name: "b"}, nil},
	} {
		letters, err := f.dead.List(t.Context(), tc.filter)
		must(t, err)
		var got []string
		for _, l := range letters {
			got = append(got, l.Message.Name)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		n, err := f.dead.Count(t.Context(), tc.filter)
		must(t, err)
		if n != len(tc.want) {
			t.Errorf("%s: counted %d, want %d", name, n, len(tc.want))
		}
	}
	l, err := f.dead.Show(t.Context(), ids["b"])
	must(t, err)
	if l.Message.Name != "b" || l.Message.Key != "kb" || l.Message.Headers["h"] != "b" || string(l.Message.Body) != "1" || l.Attempts != 1 || l.Class != string(driver.Unroutable) ||
		l.Error != "outbox: publish: unroutable: no place for b" || l.FailedAt.IsZero() || l.CreatedAt.IsZero() {
		t.Errorf("Show returned %+v", l)
	}
	if _, err := f.dead.Show(t.Context(), uuid.New()); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("an unknown id: %v", err)
	}
	for _, bad := range []outbox.Filter{{Limit: -1}, {IDs: make([]uuid.UUID, 10_001)}, {ErrorContains: strings.Repeat("x", 1001)}} {
		if _, err := f.dead.Remove(t.Context(), bad, outbox.Removal{By: "ada"}); err == nil {
			t.Errorf("%.100v was accepted", bad)
		}
	}
}

func TestDeadLetterGroups(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	relay := f.givingUp(t, func(m driver.Message) error {
		return &driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("no place for %s", m.Name)}
	})
	f.write(t, outbox.Message{Name: "a", Body: []byte("2"), Headers: map[string]string{"h": "x"}})
	drainAll(t, relay)

	groups, err := f.dead.Groups(t.Context(), outbox.Filter{})
	must(t, err)
	if len(groups) != 3 {
		t.Fatalf("%d groups, want 3: %+v", len(groups), groups)
	}
	g := groups[0]
	if s := g.Sample; g.Count != 2 || s.Message.Name != "a" || s.Message.ID == ids["a"] || s.Class != string(driver.Permanent) || s.Attempts != 1 ||
		s.Error != "outbox: publish: permanent: no place for a" || s.Message.Body != nil || s.Message.Headers != nil || s.CreatedAt.IsZero() {
		t.Errorf("the largest group is %+v", g)
	}
	if len(g.Fingerprint) != 16 || !g.First.Before(g.Last) || !g.Last.Equal(g.Sample.FailedAt) {
		t.Errorf("kind %q from %v to %v", g.Fingerprint, g.First, g.Last)
	}
	if groups, err = f.dead.Groups(t.Context(), outbox.Filter{Limit: 1}); err != nil || len(groups) != 1 || groups[0].Count != 2 {
		t.Errorf("the first group: %+v, %v", groups, err)
	}
	if groups, err = f.dead.Groups(t.Context(), outbox.Filter{Name: "b"}); err != nil || len(groups) != 1 || groups[0].Sample.Message.ID != ids["b"] {
		t.Errorf("the group of b: %+v, %v", groups, err)
	}
	if _, err := f.dead.Groups(t.Context(), outbox.Filter{Limit: -1}); err == nil {
		t.Error("a negative limit was accepted")
	}
	letters, err := f.dead.List(t.Context(), outbox.Filter{Fingerprint: g.Fingerprint})
	must(t, err)
	if len(letters) != 2 || letters[0].Message.ID != ids["a"] || letters[1].Fingerprint != g.Fingerprint {
		t.Errorf("dead letters of the largest group: %+v", letters)
	}
	n, err := f.dead.Remove(t.Context(), outbox.Filter{Fingerprint: g.Fingerprint}, outbox.Removal{By: "ada"})
	must(t, err)
	if n != 2 {
		t.Errorf("removed %d of the largest group", n)
	}
}

// Quotations, and words with digits, do not change the kind of a failure.
func TestDeadLetterFingerprints(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	relay := f.givingUp(t, func(m driver.Message) error {
		return &driver.PublishError{Class: driver.Permanent, Err: errors.New(string(m.Body))}
	})
	for _, text := range []string{
		`order 17 of "Ada" refused by 'x' at 10:20`, "order 4711 of \"Grace\" refused by 'y' at 10:21", // one kind
		`order 17 of "Ada" refused by x at 10:20`, `order lost`,
	} {
		f.write(t, outbox.Message{Name: "a", ContentType: "text/plain", Body: []byte(text)})
	}
	drainAll(t, relay)
	groups, err := f.dead.Groups(t.Context(), outbox.Filter{})
	must(t, err)
	if len(groups) != 3 || groups[0].Count != 2 {
		t.Errorf("%+v", groups)
	}
}

// A dead letter whose id was written again does not duplicate the message and does not stop the other dead letters.
// The same is true if the id is being written at that moment: the step that met it is tried once more.
func TestDeadLetterReplayMeetsAnIDOnItsWay(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	type result struct {
		n   outbox.Replayed
		err error
	}
	f.write(t, outbox.Message{ID: ids["c"], Name: "c", Body: []byte("1")})
	writer, err := f.pool.Begin(t.Context())
	must(t, err)
	defer writer.Rollback(context.Background())
	must(t, f.store.Write(t.Context(), writer, outbox.Message{ID: ids["b"], Name: "b", Body: []byte("1")}))
	results := make(chan result, 1)
	go func() {
		n, err := f.dead.Replay(t.Context(), outbox.Filter{}, byAda)
		results <- result{n, err}
	}()
	f.untilTrue(t, "no step waits for the writer yet", "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid)))", writer.Conn().PgConn().PID()) // a step gives up after a minute
	must(t, writer.Commit(t.Context()))
	r := <-results
	must(t, r.err)
	if want := (outbox.Replayed{Returned: 1, Failed: 2}); r.n != want {
		t.Errorf("%+v, want %+v", r.n, want)
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
		f.scan(t, `SELECT count(*) FROM holdfast_outbox WHERE published_at IS NOT NULL`, &n)
		return n
	}
	n, err := f.store.Prune(t.Context())
	must(t, err)
	if n != 0 || kept() != 1500 {
		t.Errorf("%d pruned too early, %d kept", n, kept())
	}
	f.exec(t, `UPDATE holdfast_outbox SET published_at = published_at - interval '2 hours' WHERE seq % 10 <> 0`)
	f.write(t, outbox.Message{Name: "new", Body: []byte("1")})
	prunable, err := f.store.Prunable(t.Context())
	must(t, err)
	if prunable != 1350 || kept() != 1500 {
		t.Errorf("%d reported as prunable, and %d kept", prunable, kept())
	}
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
	forgetful, err := outboxpgx.New(f.pool, outboxpgx.Config{})
	must(t, err)
	n, err = forgetful.Prune(t.Context())
	must(t, err)
	if n != 150 || kept() != 0 {
		t.Errorf("after removing the retention: %d pruned, %d kept", n, kept())
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
	if n := len(batch.Messages); n != 3 { // the third starts below the limit
		t.Errorf("%d messages of 400 KiB in a batch of 1 MiB", n)
	}
	_, err = f.store.Settle(t.Context(), batch, nil)
	must(t, err)
	report := drainAll(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}))
	if report.Published != 10 {
		t.Errorf("%+v", report)
	}
}

func TestReplayAtARate(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	n, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada", PerSecond: 1.0 / 3600})
	must(t, err)
	rows, _ := f.pool.Query(t.Context(), `
		SELECT name || round(extract(epoch FROM due_at - min(due_at) OVER ()) / 60) FROM holdfast_outbox ORDER BY due_at`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string]) // the error of Query too
	must(t, err)
	if want := []string{"a0", "b60", "c120"}; n.Returned != 3 || !slices.Equal(got, want) {
		t.Errorf("%+v, minutes %v, want %v", n, got, want)
	}
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 1)
	if got := publisher.Received(); len(got) != 1 || got[0].Name != "a" {
		t.Errorf("received %+v", got)
	}
}

// A dead letter may have been published in fact. If consumers may have forgotten it, it stays unless the replay is
// forced; the others return.
func TestReplay_leavesOutlived(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error, died_at)
		SELECT gen_random_uuid(), n, 0, 'a', '1', 'application/json', '', '', '', now() - n * interval '1 day', 1, 'quarantined', 'lost', now() - n * interval '1 hour'
		FROM generate_series(4, 10) n`)
	for i, c := range []struct {
		limit   int
		options outbox.Replay
		want    outbox.Replayed
	}{
		{0, outbox.Replay{DryRun: true}, outbox.Replayed{Returned: 4, Outlived: 3}},
		{1, outbox.Replay{By: "me"}, outbox.Replayed{Returned: 1, Outlived: 1}}, // the oldest returnable one, 7 days old
		{0, outbox.Replay{By: "me"}, outbox.Replayed{Returned: 3, Outlived: 3}},
		{0, outbox.Replay{By: "me"}, outbox.Replayed{Outlived: 3}},
		{0, outbox.Replay{DryRun: true, Force: true}, outbox.Replayed{Returned: 3}},
		{1, outbox.Replay{By: "me", Force: true}, outbox.Replayed{Returned: 1}},
		{0, outbox.Replay{By: "me", Force: true}, outbox.Replayed{Returned: 2}},
		{0, outbox.Replay{By: "me"}, outbox.Replayed{}},
	} {
		got, err := f.dead.Replay(t.Context(), outbox.Filter{Limit: c.limit}, c.options)
		refused := c.want.Outlived > 0
		if got != c.want || errors.Is(err, outbox.ErrOutlived) != refused || !refused && err != nil {
			t.Errorf("call %d: %+v, %v; want %+v", i, got, err, c.want)
		}
	}
	for _, rate := range []float64{-1, math.NaN()} {
		if _, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "me", PerSecond: rate}); err == nil {
			t.Errorf("%v per second was accepted", rate)
		}
	}
}

// An edited dead letter keeps everything but its body. One that cannot be edited stays. The others keep their
// intervals, however many are in memory at a time.
func TestReplayEdited(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	const n = 45
	f.exec(t, `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, ordering_key, transport_name, exchange, routing_key, created_at, attempts,
			error_class, last_error)
		SELECT gen_random_uuid(), n, 0, 'order', convert_to(n::text, 'UTF8'), '', 'k', '', '', '', now(), 3, 'permanent', 'no' FROM generate_series(1, $1) n`, n)
	edit := func(m outbox.Message) ([]byte, error) {
		if string(m.Body) == "7" {
			return nil, errOnPurpose
		}
		return append([]byte("edited "), m.Body...), nil
	}
	for _, r := range []outbox.Replay{{DryRun: true, Edit: edit}, {By: "ada", Edit: edit, PerSecond: 1.0 / 60}} {
		got, err := f.dead.Replay(t.Context(), outbox.Filter{}, r)
		if want := (outbox.Replayed{Returned: n - 1, Failed: 1}); got != want || !errors.Is(err, errOnPurpose) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
	}
	rows, _ := f.pool.Query(t.Context(), `
		SELECT convert_from(body, 'UTF8') || ' ' || name || ' ' || ordering_key || ' ' || round(extract(epoch FROM due_at - min(due_at) OVER ()) / 60)
		FROM holdfast_outbox ORDER BY seq`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string]) // the error of Query too
	must(t, err)
	if len(got) != n-1 || got[0] != "edited 1 order k 0" || got[n-2] != fmt.Sprintf("edited %d order k %d", n, n-2) {
		t.Errorf("%d messages: %v", len(got), got)
	}
	entries, err := f.store.Audit(t.Context(), 0)
	if err != nil || len(entries) != 1 || entries[0].Action != "edit" || entries[0].Count != n-1 || entries[0].Filter.IDs != nil {
		t.Errorf("audit %+v, %v", entries, err)
	}
	left, err := f.dead.List(t.Context(), outbox.Filter{Whole: true})
	if err != nil || len(left) != 1 || string(left[0].Message.Body) != "7" {
		t.Errorf("left %+v, %v", left, err)
	}
}

// A list continues after dead letters with infinite times, from another program, and between dead letters with equal
// times.
func TestList_pagesOverInfiniteTimes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error, died_at)
		SELECT gen_random_uuid(), n, 0, 'n' || n, '', '', '', '', '', now(), 1, '', '', (ARRAY['-infinity', '1969-07-20', '2026-01-01', 'infinity'])[1 + n / 3]::timestamptz
		FROM generate_series(0, 11) n`)
	all, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	after := ""
	for i, want := range all {
		page, err := f.dead.List(t.Context(), outbox.Filter{Limit: 1, After: after})
		if err != nil || len(page) != 1 || page[0].Message.ID != want.Message.ID {
			t.Fatalf("page %d behind %q: %+v, %v, want %s", i, after, page, err, want.Message.Name)
		}
		after = page[0].Cursor
	}
	if page, err := f.dead.List(t.Context(), outbox.Filter{After: after}); len(page) != 0 || err != nil {
		t.Errorf("behind the last: %+v, %v", page, err)
	}
	for _, wrong := range []string{".", "1", "1.", ".1", "x.1", "1.x", "1.2.3", "infinity"} {
		if _, err := f.dead.List(t.Context(), outbox.Filter{After: wrong}); err == nil {
			t.Errorf("%q is a cursor", wrong)
		}
	}
}

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
		if age := time.Since(got[i].At); age < -time.Minute || age > time.Minute { // timing: the time of an entry, roughly
			t.Errorf("entry %d has the time %v", i, got[i].At)
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

// An audit entry commits with its change or not at all.
func TestAuditFailsWithItsChange(t *testing.T) {
	t.Parallel()
	f, _ := withDeadLetters(t)
	f.exec(t, `ALTER TABLE holdfast_outbox_audit ADD CHECK (actor <> 'eve')`)
	if _, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "eve"}); err == nil {
		t.Error("replayed without an audit entry")
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

// Replayed messages keep the stored order, whatever the order of their failures. They come after existing messages
// and before later ones.
func TestReplayKeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	for name, perSecond := range map[string]float64{"at once": 0, "at a rate": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			message := func(name string) outbox.Message { return outbox.Message{Name: name, Key: "k", Body: []byte("1")} }
			f.write(t, message("m1"), message("m2"), message("m3"))
			drainAll(t, f.givingUp(t, func(driver.Message) error { return &driver.PublishError{Class: driver.Permanent} }))
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

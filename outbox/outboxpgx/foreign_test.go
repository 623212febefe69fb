package outboxpgx_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// foreign are rows as another program may write them, each made by changing a valid row.
var foreign = map[string]struct {
	set  string // the SET clause of the UPDATE that makes the row foreign
	dead string // a part of its dead letter's error; "": it is published
}{
	"headers with a number":         {`headers = '{"tenant": 7}'`, "headers is not a JSON object of strings"},
	"headers with an object":        {`headers = '{"tenant": {"id": "7"}}'`, "headers is not a JSON object of strings"},
	"headers with a list":           {`headers = '["tenant"]'`, "headers is not a JSON object of strings"},
	"headers that are a text":       {`headers = '"tenant"'`, "headers is not a JSON object of strings"},
	"headers of PHP without any":    {`headers = '[]', route_headers = '[]'`, ""},
	"headers that are JSON's null":  {`headers = 'null', route_headers = 'null'`, ""},
	"headers of a megabyte":         {`headers = jsonb_build_object('a', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 40000) n))`, "too large to be read"},
	"route headers with a number":   {`route_headers = '{"tenant": 7}'`, "route_headers is not a JSON object of strings"},
	"an id of version 4":            {`id = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'`, "not a UUID of version 7"},
	"the zero id":                   {`id = '00000000-0000-0000-0000-000000000000'`, "not a UUID of version 7"},
	"no name":                       {`name = ''`, "name has 0 bytes"},
	"a class as the name":           {`name = 'App\OrderPlaced'`, "is not lower-case words joined by dots"},
	"an empty key":                  {`ordering_key = ''`, ""},
	"a transport that nobody knows": {`transport_name = 'pigeon'`, `no transport "pigeon"`},
	"a huge body":                   {`body = decode(repeat('00', 33 * 1024 * 1024), 'hex')`, "too large to be read: a body of 34603008 bytes"},
	"a long name":                   {`name = repeat('a', 129)`, "too large to be read"},
	"a long content type":           {`content_type = 'text/' || repeat('a', 123)`, "too large to be read"},
	"a long transport":              {`transport_name = repeat('a', 65)`, "too large to be read"},
	"a long exchange":               {`exchange = repeat('ä', 64)`, "too large to be read"},
	"a long routing key":            {`routing_key = repeat('ä', 128)`, "too large to be read"},
	"an empty body":                 {`body = ''`, ""},
	"created in infinity":           {`created_at = 'infinity'`, "created_at is infinite"},
	"created before all time":       {`created_at = '-infinity'`, "created_at is infinite"},
	"created in the year 10000":     {`created_at = '10000-01-01'`, ""},
	"most attempts":                 {`attempts = 2147483647, name = 'a.fails'`, "scripted"},
	"attempts below zero":           {`attempts = -2147483648`, ""},
}

// One invalid row becomes a dead letter with a clear error, and the other messages of its lane and key are published.
// Neither the row nor its dead letter makes the other rows unreadable.
func TestForeignRows(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for name, c := range foreign {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{Retention: time.Hour})
			for n := range 4 {
				f.write(t, outbox.Message{Name: fmt.Sprintf("a.%d", n), Key: "k", Body: []byte("1")})
			}
			f.exec(t, `UPDATE holdfast_outbox SET `+c.set+` WHERE name = 'a.1'`)
			_, err := f.store.Depth(t.Context())
			must(t, err)
			publisher := outboxtest.NewPublisher()
			publisher.Respond(func(m driver.Message) error {
				if m.Name == "a.fails" {
					return &driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("scripted")}
				}
				return nil
			})
			relay := f.relay(t, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}})
			drainAll(t, relay)
			f.wantForeign(t, publisher.Received(), c.dead)
		})
	}
}

// wantForeign checks that the other rows are published, and the foreign one too, or that it is dead for the reason.
func (f *fixture) wantForeign(t *testing.T, received []driver.Message, dead string) {
	t.Helper()
	var sound []string
	for _, m := range received {
		sound = append(sound, m.Name)
	}
	sound = slices.DeleteFunc(sound, func(name string) bool { return name != "a.0" && name != "a.2" && name != "a.3" })
	if !slices.Equal(sound, []string{"a.0", "a.2", "a.3"}) {
		t.Errorf("published valid messages: %v", sound)
	}
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	letters, err := f.dead.List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	if dead == "" {
		if len(received) != 4 || len(letters) != 0 || stats.Ready+stats.Parked != 0 {
			t.Errorf("%d received, dead letters %v, stats %+v", len(received), letters, stats)
		}
		return
	}
	if len(letters) != 1 || !strings.Contains(letters[0].Error, dead) || stats.Dead != 1 {
		t.Fatalf("dead letters %v, stats %+v, want one with %q", letters, stats, dead)
	}
	unreadable := strings.Contains(dead, "headers is not") || strings.Contains(dead, "too large") || strings.Contains(dead, "infinite")
	if (letters[0].Unreadable != nil) != unreadable {
		t.Errorf("Unreadable of the dead letter is %v", letters[0].Unreadable)
	}
	f.retryForeign(t, letters[0])
}

// retryForeign replays the dead letter: the stored row moves unchanged, readable or not.
func (f *fixture) retryForeign(t *testing.T, letter outbox.DeadLetter) {
	t.Helper()
	const row = `SELECT md5(concat(id, name, body, headers, ordering_key, route_headers, created_at)) FROM `
	var before, after string
	must(t, f.pool.QueryRow(t.Context(), row+`holdfast_outbox_dead`).Scan(&before))
	if n, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "me", Force: true}); n.Returned != 1 || err != nil {
		t.Fatalf("retried %d, %v", n, err)
	}
	must(t, f.pool.QueryRow(t.Context(), row+`holdfast_outbox WHERE published_at IS NULL`).Scan(&after))
	if before != after {
		t.Error("the replay changed the message")
	}
	_, err := f.store.Depth(t.Context())
	must(t, err)
	drainAll(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}}))
	_, err = f.store.Prune(t.Context())
	must(t, err)
	if _, err := f.store.Audit(t.Context(), 0); err != nil {
		t.Error(err)
	}
}

// A row may wait for an infinite time.
func TestForeignTimes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	for _, key := range []string{"infinity", "-infinity", "290000-01-01", "sound"} {
		f.write(t, outbox.Message{Name: "a", Key: key, Body: []byte("1")}, outbox.Message{Name: "b", Key: key, Body: []byte("2")})
	}
	f.exec(t, `UPDATE holdfast_outbox SET due_at = ordering_key::timestamptz WHERE name = 'a' AND ordering_key <> 'sound'`)
	publisher := outboxtest.NewPublisher()
	drainAll(t, f.relay(t, publisher, outbox.RelayConfig{}))
	var got []string
	for _, m := range publisher.Received() {
		got = append(got, m.Key+" "+m.Name)
	}
	slices.Sort(got)
	if want := []string{"-infinity a", "-infinity b", "sound a", "sound b"}; !slices.Equal(got, want) {
		t.Errorf("received %q, want %q", got, want)
	}
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Second})
	must(t, err)
	if len(batch.Messages) > 0 || batch.Due < time.Hour {
		t.Errorf("claimed %d, the next is due in %v", len(batch.Messages), batch.Due)
	}
}

// Dead letters and audit entries with infinite times do not hide the others.
func TestForeignDeaths(t *testing.T) {
	t.Parallel()
	f, ids := withDeadLetters(t)
	f.exec(t, `UPDATE holdfast_outbox_dead SET died_at = CASE name WHEN 'a' THEN 'infinity' ELSE '-infinity' END::timestamptz, name = 'x',
		last_error = 'no' WHERE name <> 'b'; UPDATE holdfast_outbox_dead SET name = 'x', last_error = 'no', error_class = 'permanent'`)
	letters, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	if len(letters) != 3 || letters[0].Message.ID != ids["c"] || letters[1].FailedAt.IsZero() || !letters[2].FailedAt.IsZero() || letters[2].Unreadable != nil {
		t.Errorf("the letters are %+v", letters)
	}
	groups, err := f.dead.Groups(t.Context(), outbox.Filter{})
	must(t, err)
	if len(groups) != 1 || groups[0].Count != 3 || groups[0].Sample.Message.ID != ids["b"] || !groups[0].First.Equal(letters[1].FailedAt) || !groups[0].Last.Equal(groups[0].First) {
		t.Errorf("the groups are %+v", groups)
	}
	groups, err = f.dead.Groups(t.Context(), outbox.Filter{IDs: []uuid.UUID{ids["a"]}})
	must(t, err)
	if len(groups) != 1 || !groups[0].Last.IsZero() || !groups[0].Sample.FailedAt.IsZero() {
		t.Errorf("groups of the infinite one: %+v", groups)
	}
	_, err = f.dead.Remove(t.Context(), outbox.Filter{}, outbox.Removal{By: "ada"})
	must(t, err)
	f.exec(t, `UPDATE holdfast_outbox_audit SET at = 'infinity'`)
	entries, err := f.store.Audit(t.Context(), 0)
	if err != nil || len(entries) != 1 || entries[0].Count != 3 || !entries[0].At.IsZero() {
		t.Errorf("the entries are %+v, %v", entries, err)
	}
}

// The table rejects a lane that no relay claims, and a key that would not fit into an index.
func TestForeignRow_isRefusedByConstraint(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	for set, want := range map[string]string{
		`lane = 16`:                            "holdfast_outbox_limits",
		`ordering_key = repeat('ä', 128)`:      "holdfast_outbox_limits",
		`ordering_key = repeat('ä', 127)||'k'`: "",
	} {
		id := ids.New()
		f.exec(t, `INSERT INTO holdfast_outbox (id, lane, name, body, content_type) VALUES ($1, 1, 'a', '1', 'application/json')`, id)
		_, err := f.pool.Exec(t.Context(), `UPDATE holdfast_outbox SET `+set+` WHERE id = $1`, id)
		refused, ok := errors.AsType[*pgconn.PgError](err)
		if want == "" && err != nil || want != "" && (!ok || refused.ConstraintName != want) {
			t.Errorf("%s: the error is %v, want %q", set, err, want)
		}
	}
}

// A message with an empty key has no key: it does not wait for another message.
func TestForeignEmptyKey(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	for n := range 3 {
		f.write(t, outbox.Message{Name: fmt.Sprintf("a.%d", n), Key: "k", Body: []byte("1")})
	}
	f.exec(t, `UPDATE holdfast_outbox SET ordering_key = '', due_at = CASE WHEN name = 'a.0' THEN now() + interval '1 hour' END`)
	report := drainAll(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}))
	if report.Published != 2 {
		t.Errorf("%d published, want the two that do not wait", report.Published)
	}
}

// However large the dead letters are, a list of them stays within its limits.
func TestListIsBounded(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		SELECT gen_random_uuid(), n, 0, 'a', decode(repeat('00', 10 * 1024 * 1024), 'hex'), 'application/json', '', '', '', now(), 1, 'permanent', repeat('x', 100000)
		FROM generate_series(1, 6) n`)
	letters, err := f.dead.List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	for i, l := range letters {
		if whole := i < 3; (len(l.Message.Body) > 0) != whole || (l.Unreadable == nil) != whole || l.Message.Name != "a" || len(l.Error) > 1000 {
			t.Errorf("letter %d: a body of %d bytes, name %q, an error of %d bytes, %v", i, len(l.Message.Body), l.Message.Name, len(l.Error), l.Unreadable)
		}
	}
	letter, err := f.dead.Show(t.Context(), letters[5].Message.ID)
	must(t, err)
	if !bytes.Equal(letter.Message.Body, letters[0].Message.Body) || letter.Unreadable != nil {
		t.Errorf("a letter by itself has a body of %d bytes, %v", len(letter.Message.Body), letter.Unreadable)
	}
}

// An audit entry written by hand does not hide the others.
func TestForeignAudit(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		INSERT INTO holdfast_outbox_audit (actor, reason, action, count, filter) VALUES
		('me', 'by hand', 'remove', 1, '{"limit": 5}'), ('me', 'by hand', 'remove', 2, '["all"]'),
		('me', 'by hand', 'remove', 3, '{"failed_after": 5}')`)
	entries, err := f.store.Audit(t.Context(), 0)
	must(t, err)
	if len(entries) != 3 || entries[2].Filter.Limit != 5 || entries[2].Unreadable != nil || entries[1].Unreadable == nil || entries[0].Unreadable == nil {
		t.Errorf("entries %+v", entries)
	}
}

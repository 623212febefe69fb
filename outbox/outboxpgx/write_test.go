package outboxpgx_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// writeSQL writes a message with the function holdfast_outbox_write.
func writeSQL(t *testing.T, f *fixture, m outbox.Message) (uuid.UUID, error) {
	t.Helper()
	var id *uuid.UUID
	if m.ID != uuid.Nil {
		id = &m.ID
	}
	var notBefore *time.Time
	if !m.NotBefore.IsZero() {
		notBefore = &m.NotBefore
	}
	headers := func(of map[string]string) any {
		if of == nil {
			return nil
		}
		text, err := json.Marshal(of)
		must(t, err)
		return string(text)
	}
	body := append([]byte{}, m.Body...)
	var written uuid.UUID
	err := f.pool.QueryRow(t.Context(), `SELECT holdfast_outbox_write($1, body_bytes => $2, key => $3, headers => $4::text::jsonb, content_type => $5, transport => $6,
		exchange => $7, routing_key => $8, route_headers => $9::text::jsonb, not_before => $10, id => $11)`,
		m.Name, body, m.Key, headers(m.Headers), m.ContentType, m.Transport, m.Route.Exchange, m.Route.RoutingKey, headers(m.Route.Headers), notBefore, id).Scan(&written)
	return written, err
}

// messages are typical messages of writers, valid and invalid.
func messages() map[string]outbox.Message {
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint("h", i)] = "v"
	}
	all := map[string]outbox.Message{}
	change := func(name string, set func(m *outbox.Message)) {
		m := outbox.Message{Name: "order.placed", Body: []byte(`{"n":1}`)}
		set(&m)
		all[name] = m
	}
	for _, s := range []string{"", "a", "order-item.re_opened.v2", "9.a", "Order", "a..b", "a.", ".a", "-a", "a.-b", "a b", "ü", "order.*", "a\n", "a" + strings.Repeat("b", 127), "a" + strings.Repeat("b", 128)} {
		change(fmt.Sprintf("name %.20q %d", s, len(s)), func(m *outbox.Message) { m.Name = s })
	}
	for _, s := range []string{
		"", "null", "1", ` {"a": [1, "ü", "\u0000\ud800"]} `, `{"a":`, `{'a':1}`, `{"a":1,}`, "01", "NaN", "1e999", "\"\xff\"", "\"a\nb\"", "\"\x7f\"", "{} {}", "\x00", "\ufeff1",
		`"` + strings.Repeat("a", 1<<20-2) + `"`, `"` + strings.Repeat("a", 1<<20-1) + `"`,
	} {
		change(fmt.Sprintf("body %.30q %d", s, len(s)), func(m *outbox.Message) { m.Body = []byte(s) })
		change(fmt.Sprintf("text body %.30q %d", s, len(s)), func(m *outbox.Message) { m.Body, m.ContentType = []byte(s), "text/plain" })
	}
	for _, s := range []string{
		"application/octet-stream", "application/x+json", "application/x+JSON; charset=utf-8", "Text/Plain;charset=\"utf 8\"", "text/plain;", "text/plain ; a=b", "json", "not a type", "a/b/c",
		"text/", "/plain", "text/plain; a", "text/plain; a=1; A=2", "text/plain; a=\"x\ty\"", "text/plän", "text/plain\n", "text/" + strings.Repeat("a", 122), "text/" + strings.Repeat("a", 123),
	} {
		change(fmt.Sprintf("content type %.30q %d", s, len(s)), func(m *outbox.Message) { m.ContentType = s })
		change(fmt.Sprintf("content type %.30q %d, no JSON", s, len(s)), func(m *outbox.Message) { m.ContentType, m.Body = s, []byte("{") })
	}
	for _, s := range []string{"k", "Kunde/Ü 7", "a\x1f", "a\x7f", "a\u0085", "a\u00a0", strings.Repeat("ü", 127), strings.Repeat("ü", 128), strings.Repeat("k", 255), strings.Repeat("k", 127), strings.Repeat("k", 64)} {
		change(fmt.Sprintf("key %.20q %d", s, len(s)), func(m *outbox.Message) { m.Key = s })
		change(fmt.Sprintf("transport %.20q %d", s, len(s)), func(m *outbox.Message) { m.Transport = s })
		change(fmt.Sprintf("exchange %.20q %d", s, len(s)), func(m *outbox.Message) { m.Route.Exchange = s })
		change(fmt.Sprintf("routing key %.20q %d", s, len(s)), func(m *outbox.Message) { m.Route.RoutingKey = s })
		change(fmt.Sprintf("header value %.20q %d", s, len(s)), func(m *outbox.Message) { m.Headers = map[string]string{"a": s} })
		change(fmt.Sprintf("header name %.20q %d", s, len(s)), func(m *outbox.Message) { m.Route.Headers = map[string]string{s: "v"} })
	}
	for _, s := range []string{
		"", "type", "Type", "types", "CC", "bcc", "x-death", "x-deaths", "X-First-Death-Reason", "x-last-death-queue", "x-delivery-count", "X-Acquired-Count", "x-delivery-zone", "x-acquired-by", "x-opt-a", "X-Opt-Rabbitmq-Sent-Time", "x-opt-deaths", "x-first-death-a", "x-tenant", "holdfast-attempt", "holdfast", "x-ours",
		`X-Message-Stamp-App\Bus`, "a b", "a" + strings.Repeat("b", 127), "a" + strings.Repeat("b", 128),
	} {
		change(fmt.Sprintf("header %.20q %d", s, len(s)), func(m *outbox.Message) { m.Headers = map[string]string{s: "v"} })
	}
	change("64 headers", func(m *outbox.Message) { delete(many, "h0"); m.Headers = many })
	change("65 headers", func(m *outbox.Message) {
		m.Headers = map[string]string{"more": "v"}
		for name := range many {
			m.Headers[name] = "v"
		}
	})
	change("no headers", func(m *outbox.Message) { m.Headers = map[string]string{} })
	change("16 KiB of headers", func(m *outbox.Message) { m.Headers = map[string]string{"a": strings.Repeat("v", 16<<10-1)} })
	change("more headers", func(m *outbox.Message) { m.Headers = map[string]string{"a": strings.Repeat("v", 16<<10)} })
	change("an id", func(m *outbox.Message) { m.ID = uuid.Must(uuid.NewV7()) })
	change("an id of version 4", func(m *outbox.Message) { m.ID = uuid.New() })
	change("an id of another variant", func(m *outbox.Message) { m.ID = uuid.MustParse("019da3b2-7c4d-7e8f-c1b2-c3d4e5f60718") })
	for _, year := range []int{1, 1999, 3000, 9999, 10000, 100000} {
		change(fmt.Sprint("year ", year), func(m *outbox.Message) { m.NotBefore = time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC) })
	}
	return all
}

// The SQL function stores the same rows as Write, and rejects the same messages.
func TestFunctionWrites(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	// all columns that a writer sets; the id if the message has one, because of its lane
	const row = `SELECT json_build_array(CASE WHEN $2 THEN id END, CASE WHEN $2 OR ordering_key IS NOT NULL THEN lane END, name, md5(body), content_type, headers, ordering_key, transport_name,
		exchange, routing_key, route_headers, due_at, published_at, held, attempts)::text FROM holdfast_outbox WHERE id = $1`
	for name, m := range messages() {
		_, refused := outbox.Prepare(t.Context(), []outbox.Message{m}, 0)
		id, err := writeSQL(t, f, m)
		if (err == nil) != (refused == nil) {
			t.Errorf("%s: Go returns %v, SQL returns %v", name, refused, err)
			continue
		}
		if err != nil {
			if state, ok := errors.AsType[*pgconn.PgError](err); !ok || state.Code != "22023" && state.Code != "22P02" && state.Code != "22021" {
				t.Errorf("%s: returned %v", name, err)
			}
			continue
		}
		var bySQL, byGo string
		must(t, f.pool.QueryRow(t.Context(), row, id, m.ID != uuid.Nil).Scan(&bySQL))
		f.exec(t, `DELETE FROM holdfast_outbox`)
		given := m.ID != uuid.Nil
		if !given {
			m.ID = uuid.Must(uuid.NewV7())
		}
		f.write(t, m)
		must(t, f.pool.QueryRow(t.Context(), row, m.ID, given).Scan(&byGo))
		if bySQL != byGo {
			t.Errorf("%s: SQL wrote %.500s, Go wrote %.500s", name, bySQL, byGo)
		}
	}
}

// The ids from the function have version 7 and the current time, and are all different.
func TestFunctionIDs(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `SELECT holdfast_outbox_write('a', '1') FROM generate_series(1, 1000)`)
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 1000) // a relay checks each id
	for _, m := range publisher.Received() {
		sec, nsec := m.ID.Time().UnixTime()
		if age := time.Since(time.Unix(sec, nsec)); age < -time.Minute || age > 10*time.Minute { // timing: the time of an id, roughly
			t.Fatalf("the id %s has a time %v ago", m.ID, age)
		}
	}
}

// Callers who use the function by hand can rely on the defaults and checks of its arguments.
func TestFunctionArguments(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	for call, refused := range map[string]string{
		`'a', '{"n": 1}'`: "",
		`'a', body => '{"n": "\n"}', key => 'k', headers => '[]'`: "",
		`'a', '1', headers => '{"n": 1}'`:                         "Headers has a value for n",
		`'a', '1', headers => '[1]'`:                              "Headers is not a JSON object",
		`'a', '1', route_headers => '"x"'`:                        "Route.Headers is not a JSON object",
		`'a'`:                                                     "Body wants either",
		`'a', '1', body_bytes => '1'`:                             "Body wants either",
		`'a', '12345', max_body_bytes => 4`:                       "Body has 5 bytes",
		`'a', '1', not_before => 'infinity'`:                      "NotBefore",
		`'a', '1', not_before => '0044-03-15 BC'`:                 "NotBefore",
		`'A', '1', key => E'\x01'`:                                "Name wants lower-case words joined by dots, at most 128 bytes; Key",
		`NULL, '1'`:                                               "Name",
		`'a', repeat('1', 1048577), max_body_bytes => NULL`:       "at most 1048576 are",
		`'a', repeat('1', 1048577), max_body_bytes => 0`:          "at most 1048576 are",
		`'a', repeat('1', 16777217), max_body_bytes => 20000000`:  "at most 16777216 are",
		`'a', repeat('[', 100000) || repeat(']', 100000)`:         "54001",
	} {
		_, err := f.pool.Exec(t.Context(), `SELECT holdfast_outbox_write(`+call+`)`)
		if (err == nil) != (refused == "") || err != nil && !strings.Contains(err.Error(), refused) {
			t.Errorf("%s: %v", call, err)
		}
	}
}

// The function writes into its own table, independent of the caller's search path and of temporary tables with that
// name.
func TestWriteFunction_ignoresSearchPath(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	f := setupOn(t, pool, outboxpgx.Config{})
	must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `CREATE TEMP TABLE holdfast_outbox (LIKE holdfast_outbox INCLUDING ALL) ON COMMIT DROP;
			SELECT holdfast_outbox_write('a', '1'); SET LOCAL search_path = pg_catalog; SELECT `+pgx.Identifier{schema}.Sanitize()+`.holdfast_outbox_write('a', '2')`)
		return err
	}))
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 2)
	if got := len(publisher.Received()); got != 2 {
		t.Errorf("%d messages are in the table", got)
	}
}

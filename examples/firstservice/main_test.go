package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// newSchema is an empty schema with the tables.
func newSchema(t *testing.T) (*pgxpool.Pool, app) {
	pool := pgtest.New(t)
	a := newApp(pool, nil)
	check(a.migrate(t.Context(), pool))
	return pool, a
}

func TestCreate_writesRowAndMessage(t *testing.T) {
	pool, a := newSchema(t)
	form := strings.NewReader(url.Values{"email": {"ann@example.com"}}.Encode())
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/signups", form)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	a.create(httptest.NewRecorder(), r)
	var rows, messages int
	const query = "SELECT (SELECT count(*) FROM signups), (SELECT count(*) FROM holdfast_outbox)"
	check(pool.QueryRow(t.Context(), query).Scan(&rows, &messages))
	if rows != 1 || messages != 1 {
		t.Errorf("%d rows, %d messages, want 1 of each", rows, messages)
	}
}

func TestMailer_recordsMailOnce(t *testing.T) {
	pool, _ := newSchema(t)
	proof := txretrytest.Proof{Pool: pool, Reset: "TRUNCATE mails, holdfast_inbox", Rows: []string{"TABLE mails"}}
	message := inbox.Message{Name: "signup.created", Body: []byte(`{"id": "0198a7a4-0000-7000-8000-000000000001"}`)}
	inboxtest.Prove(t, proof, message, func(pool *pgxpool.Pool) (inbox.Processor, error) { return newApp(pool, nil).mailer, nil })
}

func TestSweep_expiresOpenSignups(t *testing.T) {
	pool, a := newSchema(t)
	must(pool.Exec(t.Context(), "INSERT INTO signups VALUES (gen_random_uuid(), 'a@b', 'open', now()), (gen_random_uuid(), 'c@d', 'confirmed', now())"))
	report, err := must(expiry.NewSweeper(a.signups, expiry.SweeperConfig{})).Sweep(context.WithoutCancel(t.Context()))
	if err != nil || report.Expired != 1 {
		t.Errorf("%d expired, %v, want 1", report.Expired, err)
	}
}

package main

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// newSchema is an empty schema with the tables.
func newSchema(t *testing.T) (*pgxpool.Pool, app) {
	t.Helper()
	pool := pgtest.New(t)
	a := newApp(pool, nil)
	check(a.migrate(t.Context(), pool))
	return pool, a
}

func TestMailer_recordsMailOnce(t *testing.T) {
	pool, _ := newSchema(t)
	proof := txretrytest.Proof{Pool: pool, Reset: "TRUNCATE mails, holdfast_inbox", Rows: []string{"TABLE mails"}}
	message := inbox.Message{Name: "signup.created", Body: []byte(`{"id": "0198a7a4-0000-7000-8000-000000000001"}`)}
	inboxtest.Prove(t, proof, message, func(pool *pgxpool.Pool) (inbox.Processor, error) { return newApp(pool, nil).mailer, nil })
}

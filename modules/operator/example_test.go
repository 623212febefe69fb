package operator_test

import (
	"context"
	"log/slog"
	"net/http"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// The parts of a service.
var (
	pool     *pgxpool.Pool
	store    *outboxpgx.Store
	relay    *outbox.Relay
	consumer *inboxamqp.Consumer
	entries  *inboxpgx.Store
)

// A service mounts the commands in its own binary.
func Example() {
	ctx := context.Background()
	log, err := operator.NewPostgresLog(pool)
	if err != nil {
		slog.Error("no operator", slog.Any("error", err))
		os.Exit(1)
	}

	service := operator.Config{
		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: entries}},
		Log:       log,
	}
	os.Exit(command.Run(ctx, service, os.Args[1:], os.Stdout, os.Stderr))
}

type person struct {
	Name              string
	Support, Operator bool
}

// The service's own users, messages and server.
var (
	service      operator.Config
	mux          *http.ServeMux
	server       *http.Server
	whoIs        func(*http.Request) (person, error)
	withoutNames func(body []byte) []byte
)

// A service mounts the page beside its own routes.
func Example_page() {
	handler, err := page.New(service, page.Config{
		Authorize: func(r *http.Request) (operator.Access, error) {
			user, err := whoIs(r)
			return operator.Access{By: user.Name, Bodies: user.Support, Change: user.Operator}, err
		},
		Mask: func(m operator.MaskedMessage) []byte { return withoutNames(m.Body) },
	})
	if err != nil {
		slog.Error("no operator", slog.Any("error", err))
		os.Exit(1)
	}
	mux.Handle("/operator/", http.StripPrefix("/operator", handler))
	server.RegisterOnShutdown(handler.Close)
}

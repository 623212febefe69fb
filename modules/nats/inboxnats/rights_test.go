package inboxnats_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
)

// Users with the documented rights set up a consumer, run it, and return its dead letters.
func TestRights(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		partitions int
		calls      []string // of the worker
		ordered    []bool   // its runs
	}{
		"whole":      {1, []string{"Run", "Ordered"}, []bool{true, false}},
		"partitions": {2, []string{"Run", "Ordered", "Partitions"}, []bool{true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rights := natstest.ReadRights(t)
			if tc.partitions > 1 {
				rights.Replace("billing", "*")
			}
			connect := rights.Limited(t, map[string][]string{"deployer": {"Setup", "Check"}, "worker": tc.calls, "operator": {"DeadLetters"}})
			handled := make(chan *inbox.Message, 10)
			as := func(user string, ordered bool) *inboxnats.Consumer {
				c, err := inboxnats.NewConsumer(connect(user), inboxnats.Stream{Name: "shop", Partitions: tc.partitions}, brokenOnce(t, handled), inbox.ConsumerConfig{
					Name: billing, Ordered: ordered, Logger: slog.New(slog.DiscardHandler),
				})
				noError(t, err)
				return c
			}
			deployer := as("deployer", true)
			noError(t, deployer.Setup(t.Context()))
			if err := deployer.Check(t.Context()); strings.Count(err.Error(), "\n") > 0 { // one finding: there is no ledger
				t.Error(err)
			}
			publishOne(t, connect("admin"), tc.partitions)
			for i, ordered := range tc.ordered { // the first run makes a dead letter
				ctx, stop := context.WithCancel(t.Context())
				worker, ended := as("worker", ordered), make(chan error, 1)
				go func() { ended <- worker.Run(ctx) }()
				<-handled
				testenv.Eventually(t, func() error { return worker.Ready(t.Context()) })
				if i == 0 {
					testenv.Eventually(t, func() error {
						got, err := as("operator", true).DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
						if err == nil && got.Returned != 1 {
							err = errors.New("there is no dead letter")
						}
						return err
					})
				}
				stop()
				noError(t, <-ended)
			}
		})
	}
}

// brokenOnce fails for messages that were not replayed.
func brokenOnce(t *testing.T, handled chan<- *inbox.Message) *inbox.Mux {
	t.Helper()
	mux := inbox.NewMux()
	noError(t, inbox.Handle(mux, "order.placed", func(ctx context.Context, _ struct{}) error {
		m, _ := inbox.FromContext(ctx)
		handled <- m
		if m.Replays > 0 {
			return nil
		}
		return inbox.Unrecoverable(errors.New("broken"))
	}))
	return mux
}

func publishOne(t *testing.T, conn *nats.Conn, partitions int) {
	t.Helper()
	p, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: "shop", Partitions: map[string]int{"shop": partitions}})
	noError(t, err)
	outcome := make(chan error, 1)
	p.Publish(t.Context(), outbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte("{}")}, func(err error) { outcome <- err })
	noError(t, <-outcome)
}

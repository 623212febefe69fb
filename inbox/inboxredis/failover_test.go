package inboxredis_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A replica that has taken over takes claims, though nobody refers the client to it.
func TestClusterFailoverOfClaims(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Namespace: "failover"}, func(context.Context, conformance.Event) error { return nil })
	claim := func() error { return process(t, p, event()) }
	if err := claim(); err != nil {
		t.Fatal(err)
	}
	failOver()
	testenv.Eventually(t, claim)
}

// A consumer goes on there, too.
func TestClusterFailoverOfAStream(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	handled := make(chan struct{}, 100)
	mux := inbox.NewMux()
	handle(t, mux, event().Name, func(context.Context) error {
		handled <- struct{}{}
		return nil
	})
	c := newConsumer(t, client, mux, inboxredis.Config{})
	defer start(t, c)()
	arrives := func() {
		t.Helper()
		select {
		case <-handled:
		case <-time.After(testenv.Patience):
			t.Fatal("no message arrives")
		}
	}
	publish(t, client, event())
	arrives()
	publish(t, failOver(), event())
	arrives()
}

package inboxnats_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

// A replay stores its copy and cannot delete the dead letter. The next replay counts the message, and stores no second
// copy.
func TestReplay_afterFailedDelete(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.NATS, `authorization { users: [
		{user: admin, password: a}
		{user: clerk, password: c, permissions: {publish: {deny: ["$JS.API.STREAM.MSG.DELETE.>"]}}} ] }`, "no_auth_user: admin")
	admin := natstest.Connect(t, server.URL())
	letters := func(user string) inbox.DeadLetters {
		conn := natstest.Connect(t, strings.Replace(server.URL(), "//", "//"+user+"@", 1))
		cfg := inbox.ConsumerConfig{Name: billing, Logger: slog.New(slog.DiscardHandler)}
		c, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: "shop", Timeout: time.Second}, inbox.NewMux(), cfg)
		noError(t, err, c.Setup(t.Context()))
		return c.DeadLetters()
	}
	allowed, denied := letters("admin:a"), letters("clerk:c")
	_, err := natstest.JetStream(t, admin).Publish(t.Context(), "holdfast.shop.billing.dead.all.failed_default", nil)
	noError(t, err)
	if got, err := denied.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 0 || got.Failed != 1 || err == nil {
		t.Errorf("a replay that cannot delete: %+v, error %v", got, err)
	}
	if got, err := allowed.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 1 || err != nil {
		t.Errorf("the replay after it: %+v, error %v", got, err)
	}
	copies, err := natstest.JetStream(t, admin).Stream(t.Context(), "shop=billing=retries")
	noError(t, err)
	if n := copies.CachedInfo().State.Msgs; n != 1 {
		t.Errorf("%d copies, want 1", n)
	}
	if n, err := allowed.Count(t.Context(), inbox.Filter{Class: driver.ClassDefault}); n != 0 || err != nil {
		t.Errorf("%d dead letters are left, error %v", n, err)
	}
}

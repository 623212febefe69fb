package browser_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

// site is an operator's page in this process, and its address.
func site(t *testing.T, cfg operator.Config) (url string) {
	t.Helper()
	cfg.Log = &operator.MemoryLog{}
	o, err := operator.New(cfg)
	check(t, err)
	page, err := o.Handler(operator.PageConfig{Authorize: func(*http.Request) (operator.Access, error) {
		return operator.Access{By: "ada", Bodies: true, Change: true}, nil
	}})
	check(t, err)
	server := httptest.NewServer(page)
	t.Cleanup(server.Close)
	t.Cleanup(page.Close)
	return server.URL + "/"
}

// consumer is one of inboxtest or inboxamqp.
type consumer interface {
	operator.DeadLetterer
	Stats(context.Context) (inbox.Stats, error)
}

// gated is a consumer whose replays stop in their middle until they are let go on.
type gated struct {
	consumer
	middle int
	open   chan struct{}
	goOn   func()
}

// newGated has replays stop after so many letters, no longer than the test takes.
func newGated(t *testing.T, c consumer, middle int) *gated {
	t.Helper()
	g := &gated{consumer: c, middle: middle, open: make(chan struct{})}
	g.goOn = sync.OnceFunc(func() { close(g.open) })
	t.Cleanup(g.goOn)
	return g
}

// DeadLetters are those of the consumer.
func (g *gated) DeadLetters() inbox.DeadLetters { return gatedLetters{g.consumer.DeadLetters(), g} }

type gatedLetters struct {
	inbox.DeadLetters
	gate *gated
}

func (l gatedLetters) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	tell := how.Progress
	how.Progress = func(r inbox.Replayed) {
		if tell == nil {
			return // it is a preview
		}
		tell(r)
		if r.Returned == l.gate.middle {
			<-l.gate.open
		}
	}
	return l.DeadLetters.Replay(ctx, f, how)
}

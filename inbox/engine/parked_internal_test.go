package engine

import (
	"log/slog"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// What was done for an earlier session says nothing of a key's first message that is in hand for this one.
func TestParkedKeyAndAnEarlierSession(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Prefetch: 10, Logger: slog.New(slog.DiscardHandler)}}}
	earlier, session := &session{}, &session{}
	h := newHand(cfg)
	k := newKeeper(cfg, &signals{}, func(event) {})
	p := &parked{hand: h, keeper: k, claims: &claims{hand: h, keeper: k}, most: 10, keys: map[string]*parkedKey{}}
	h.parked = p
	p.serve(session)
	now := time.Now()
	p.look(event{session: session, heads: []driver.Head{{Key: "k"}}, served: true}, now)
	m := &inbox.Message{ID: ids.New(), Name: "order", Attempt: 1}
	p.first(event{session: session, answer: answer{question: question{name: "k"}, message: m, until: now.Add(time.Minute), there: true}}, now)
	if !p.keys["k"].busy {
		t.Fatal("the message is not in hand")
	}
	p.settled([]driver.Delivery{&storedDelivery{"k", m, earlier}})
	p.moved(&item{session: earlier, parkedAs: "k", m: m, order: order{target: toStop}})
	if got := p.keys["k"]; !got.busy || got.stopped || p.inHand != 1 {
		t.Errorf("the key is %+v, %d in hand", got, p.inHand)
	}
	p.settled([]driver.Delivery{&storedDelivery{"k", m, session}})
	if got := p.keys["k"]; got.busy || p.inHand != 0 {
		t.Errorf("in the end the key is %+v, %d in hand", got, p.inHand)
	}
}

package engine

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// openedAtOnce is how many slow deliveries are decoded at a time: the decoding needs a processor each.
const openedAtOnce = 2

// opener makes items of deliveries. It decodes slow ones on goroutines of their own, so that the receiver
// goes on: others overtake them. Those of an ordered consumer are decoded at once, because their keys decide
// what may overtake what.
type opener struct {
	receiver *receiver
	session  *session
	ctx      context.Context // of the wish
	slots    chan struct{}
	running  sync.WaitGroup
}

func newOpener(r *receiver, s *session, ctx context.Context) *opener {
	return &opener{receiver: r, session: s, ctx: ctx, slots: make(chan struct{}, openedAtOnce)}
}

// take returns the items of what has arrived but for slow ones, which are posted later.
func (o *opener) take(ds []driver.Delivery) []item {
	items := make([]item, 0, len(ds))
	now := time.Now()
	for _, d := range ds {
		slow, ok := d.(driver.SlowDelivery)
		if ok && !o.receiver.cfg.Ordered && slow.Slow() {
			o.running.Go(func() { o.open(d) })
			continue
		}
		items = append(items, o.receiver.item(o.session, d, now))
	}
	return items
}

// open posts an item, or gives the delivery back when the wish has ended before its turn.
func (o *opener) open(d driver.Delivery) {
	select {
	case o.slots <- struct{}{}:
		defer func() { <-o.slots }()
	case <-o.ctx.Done():
	}
	if o.ctx.Err() != nil {
		_ = o.session.GiveBack(o.receiver.ctx, []driver.Delivery{d}) // it fails with its session, and comes again all the same
		return
	}
	o.receiver.post(event{kind: arrived, session: o.session, items: []item{o.receiver.item(o.session, d, time.Now())}})
}

package inboxpgx

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
)

// errNoOutcome is the result of a message whose goroutine, or that of the transaction, was
// exited by a handler.
var errNoOutcome = errors.New("inboxpgx: a handler exited its goroutine")

// work is what a handler wants done in the transaction.
type work struct {
	one     func(ctx context.Context, tx pgx.Tx) error
	timeout time.Duration // of one; 0 means none

	many *batchHandler // does the same for neighbours of its kind; nil for the other handlers
	item any           // this message, as many takes it
}

// member is a message that takes part in the transaction of a batch.
type member struct {
	ctx     context.Context
	index   int // in the batch
	m       *inbox.Message
	work    work
	outcome chan error // one place
}

type placeKey struct{}

// place is where a message's handler joins the batch, or says that it will not.
type place struct {
	index    int
	taken    atomic.Bool
	arrivals chan<- *member // buffered for all messages
}

// join waits for the outcome of the batch's transaction. Once more within one delivery, as
// middleware may, a handler works alone.
func (p *place) join(ctx context.Context, m *inbox.Message, w work) (outcome error, joined bool) {
	if !p.taken.CompareAndSwap(false, true) {
		return nil, false
	}
	b := &member{ctx: ctx, index: p.index, m: m, work: w, outcome: make(chan error, 1)}
	p.arrivals <- b
	return <-b.outcome, true
}

func (p *place) leave() {
	if p.taken.CompareAndSwap(false, true) {
		p.arrivals <- nil
	}
}

// batch processes messages in one transaction. Each one's middleware, decoding, Waiter and
// Prepare step run on a goroutine of its own; when all have come as far as the transaction,
// or have failed before, it begins.
func (s *Store) batch(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	arrivals := make(chan *member, len(msgs))
	var all sync.WaitGroup
	for i := range msgs {
		results[i] = errNoOutcome
		own := &place{index: i, arrivals: arrivals}
		all.Go(func() {
			defer own.leave()
			results[i] = s.mux.Process(context.WithValue(ctx, placeKey{}, own), msgs[i:i+1])[0]
		})
	}
	var members []*member
	for range msgs {
		if b := <-arrivals; b != nil {
			members = append(members, b)
		}
	}
	slices.SortFunc(members, func(a, b *member) int { return a.index - b.index })
	defer func() { // nobody waits for ever, also when a handler exits this goroutine
		for _, b := range members {
			b.settle(errNoOutcome)
		}
		all.Wait()
	}()
	s.inTurn(ctx, members)
	return results
}

// settle gives a member its outcome; only the first one counts.
func (b *member) settle(err error) {
	select {
	case b.outcome <- err:
	default:
	}
}

// inTurn processes the members together, further copies of a message after the first.
func (s *Store) inTurn(ctx context.Context, members []*member) {
	for len(members) > 0 {
		var now, later []*member
		seen := make(map[uuid.UUID]bool, len(members))
		for _, b := range members {
			if seen[b.m.ID] {
				later = append(later, b)
				continue
			}
			seen[b.m.ID] = true
			now = append(now, b)
		}
		s.together(ctx, now)
		members = later
	}
}

package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// errExited is the result of a message whose goroutine, or that of the transaction, was exited by a
// handler.
var errExited = errors.New("inboxpgx: a handler exited its goroutine")

// member is one message of a call of Process.
type member struct {
	call *inbox.Call
	ctx  context.Context // for its handler
	work *work
	key  string       // its ordering key, where keys are stopped; empty: none
	head *driver.Head // it is the first message of a stopped key; nil: it has come from a queue

	begun func() // called when the transaction of the head has begun
	free  bool   // the key was stopped in the last transaction, and was free after it

	ended  bool // the result is the message's
	result error

	// Of the last attempt of a batch's transaction:
	first  bool  // its entry was made
	failed error // its handler has failed and is undone
}

func (b *member) message() *inbox.Message { return b.call.Message }

func (b *member) end(result error) { b.ended, b.result = true, result }

// Process implements inbox.Processor: one transaction for all messages, as the package
// comment describes. Consumers make the batches (inbox.ConsumerConfig.Batch).
func (s *Store) Process(ctx context.Context, msgs []*inbox.Message) (results []error) {
	members := make([]*member, len(msgs))
	for i, call := range s.mux.Decode(msgs) {
		members[i] = &member{call: call, result: errExited, key: s.parks.keyOf(call.Message)}
	}
	defer s.slots.take(ctx, msgs)()
	results = make([]error, len(msgs))
	defer func() { // also when a handler exits the goroutine
		for i, b := range members {
			results[i] = b.call.End(b.result)
		}
	}()
	for _, b := range members {
		b.begin(ctx)
		s.parkEarly(b)
	}
	if len(members) == 1 {
		s.single(members[0])
		return results
	}
	prepareAll(members)
	for some := left(members); len(some) > 0; some = left(members) {
		s.together(ctx, apart(some))
	}
	return results
}

// begin runs the message's middleware.
func (b *member) begin(ctx context.Context) {
	var err error
	if b.ctx, err = b.call.Begin(ctx); err != nil {
		b.end(err)
		return
	}
	switch w := b.call.Work.(type) {
	case *work:
		b.work = w
	case func(context.Context) error: // that of Fallback
		b.work = &work{prepare: w}
	}
	b.work.timeout = cmp.Or(b.work.timeout, base.HandlerTimeout(ctx))
}

// single processes a message that is given alone. Its Timeout is for all of it.
func (s *Store) single(b *member) {
	if b.ended {
		return
	}
	ctx, cancel := b.prepare()
	defer cancel()
	if !b.ended {
		s.alone(ctx, b)
	}
}

// prepareAll does what comes before the transaction of a batch, for all messages at once.
func prepareAll(members []*member) {
	var all sync.WaitGroup
	for _, b := range members {
		if !b.ended && (b.work.wait != nil || b.work.prepare != nil) {
			all.Go(func() {
				_, cancel := b.prepare()
				cancel()
			})
		}
	}
	all.Wait()
}

// prepare waits for leave to start, and does what comes before the transaction, which for some is
// all. The context that it returns is the one that the Timeout bounds.
func (b *member) prepare() (bounded context.Context, cancel context.CancelFunc) {
	err := errExited
	defer func() {
		if err != nil || b.work.one == nil {
			b.end(err)
		}
	}()
	if err = b.await(); err != nil {
		return b.ctx, func() {}
	}
	err = errExited
	bounded, cancel = withTimeout(b.ctx, b.work.timeout)
	err = safely(func() error {
		if b.work.prepare == nil {
			return nil
		}
		err := b.work.prepare(bounded)
		if err == nil && bounded.Err() != nil && b.work.one != nil { // else it would count as if there had been no connection
			err = fmt.Errorf("inboxpgx: the Prepare step took all the time: %w", context.Cause(bounded))
		}
		return err
	})
	return bounded, cancel
}

// await runs the Waiter of the message's name.
func (b *member) await() error {
	if b.work.wait == nil {
		return nil
	}
	return safely(func() error {
		_, _, err := b.work.wait(b.ctx, b.message())
		return err
	})
}

// left are the members without a result.
func left(members []*member) (some []*member) {
	for _, b := range members {
		if !b.ended {
			some = append(some, b)
		}
	}
	return some
}

// apart are the members but for further copies of one message, which come after it.
func apart(members []*member) (some []*member) {
	seen := make(map[uuid.UUID]bool, len(members))
	for _, b := range members {
		if id := b.message().ID; !seen[id] {
			seen[id] = true
			some = append(some, b)
		}
	}
	return some
}

// safely returns the panic of a handler as an error, so that the others can go on.
func safely(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &base.Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}

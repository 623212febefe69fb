package inboxnats

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Order.
//
// The owner of an ordered stream, or of a partition, holds a lease: the last message on the subject own.owner.<partition>
// of the stream <stream>=<consumer>=owners, which the server deletes when it is 8 seconds old. The owner writes it again
// every 2 seconds, each time by the number of the one before, so that only one process succeeds. At its end it writes
// "free" there, which anybody may replace.
//
// The durable consumer numbers its deliveries. The owner knows the number of the next one: if another comes, then messages
// went to a process that has lost the lease, or were lost on their way, and the session ends. So the lease need not be
// exact: the numbers keep the order.
//
// A new owner asks how many messages are delivered and not acknowledged, and up to where. It hands out nothing until it has
// all of these, sorted. After an owner that died, or lost messages, it first waits for the ack wait, after which the server
// gives them to anybody.

const (
	// leaseTime is after how long without renewal a lease is over.
	leaseTime = 8 * time.Second
	// leaseEvery is how often a process without the lease asks for it. Receive returns within a second.
	leaseEvery = 500 * time.Millisecond

	leaseFree = "free" // nothing is left with the owner before
	leaseLost = "lost" // something may be
)

var errLease = errors.New("inboxnats: another process serves the stream now")

// lease is that of one session.
type lease struct {
	source *source

	mu    sync.Mutex
	rev   uint64
	until time.Time // it lasts; zero: it was not taken
	clean bool      // the owner before has left nothing. Of the goroutine that receives
}

// lasts reports whether the lease is this session's.
func (l *lease) lasts() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.until)
}

// take takes the lease if it has no owner, else it waits a little.
func (l *lease) take(ctx context.Context) (taken bool, err error) {
	l.mu.Lock()
	expired := !l.until.IsZero()
	l.mu.Unlock()
	if expired {
		return false, errLease
	}
	var before jetstream.RawStreamMsg
	if err := l.source.call(ctx, "lease", func(ctx context.Context) error {
		stream, err := l.source.js.Stream(ctx, l.source.owners)
		if err != nil {
			return err
		}
		last, err := stream.GetLastMsgForSubject(ctx, l.source.owner)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil
		}
		if err == nil {
			before = *last
		}
		return err
	}); err != nil {
		return false, err
	}
	state := string(before.Data)
	if before.Sequence > 0 && state != leaseFree && state != leaseLost {
		_ = runloop.Sleep(ctx, leaseEvery) // its end is looked for first
		return false, nil
	}
	err = l.write(ctx, before.Sequence, "held")
	if isOvertaken(err) {
		return false, nil
	}
	l.clean = state == leaseFree
	return err == nil, err
}

// write replaces the lease of a number.
func (l *lease) write(ctx context.Context, rev uint64, state string) error {
	began := time.Now()
	return l.source.call(context.WithoutCancel(ctx), "lease", func(ctx context.Context) error {
		ack, err := l.source.js.PublishMsg(ctx, &nats.Msg{Subject: l.source.owner, Data: []byte(state)}, jetstream.WithExpectLastSequencePerSubject(rev))
		if err != nil {
			return err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.rev, l.until = ack.Sequence, began.Add(leaseTime)
		return nil
	})
}

// isOvertaken reports whether another process has written the lease.
func isOvertaken(err error) bool {
	answer, ok := errors.AsType[jetstream.JetStreamError](err)
	return ok && answer.APIError() != nil && (answer.APIError().ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || answer.APIError().ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// renew keeps the lease. An error says that it is over.
func (l *lease) renew(ctx context.Context) error {
	l.mu.Lock()
	rev, taken := l.rev, !l.until.IsZero()
	l.mu.Unlock()
	if !taken {
		return nil
	}
	err := l.write(ctx, rev, "held")
	if isOvertaken(err) || !l.lasts() {
		return errLease
	}
	l.source.warn(ctx, "inbox: could not renew lease", err)
	return nil
}

// leave gives the lease to others.
func (l *lease) leave(ctx context.Context, clean bool) error {
	if !l.lasts() {
		return nil
	}
	state := leaseLost
	if clean {
		state = leaseFree
	}
	l.mu.Lock()
	rev := l.rev
	l.mu.Unlock()
	err := l.write(ctx, rev, state)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until = time.Time{}
	if isOvertaken(err) {
		return nil
	}
	return err
}

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
// The owner of an ordered stream or partition holds a lease. It is the last message on the subject
// own.owner.<partition> of the stream <stream>=<consumer>=owners, and the server deletes it after 8 seconds. The
// owner writes it again every 2 seconds, each time on condition of the previous number, so that only one process
// succeeds. The message names the process: if an answer is lost, the process finds its own name and goes on. At its end the
// owner writes "free", which any process may replace.
//
// The durable consumer numbers its deliveries, and the owner knows the next number. If another one arrives, messages
// were lost on their way or went to a process that has lost the lease, and the session ends. So the lease need not be
// exact: the numbers keep the order.
//
// A new owner asks for the number of delivered and unacknowledged messages and for the last of them. It hands out
// nothing until it has all of them, sorted. The server redelivers those that the previous owner has not requeued after
// the ack wait. Newer messages that arrive before them mean that they are not due, so the next request waits.

const (
	// leaseTime is how long a lease lasts without renewal.
	leaseTime = 8 * time.Second
	// leaseEvery is the interval in which a process without the lease tries to take it. Receive returns within a
	// second.
	leaseEvery = 500 * time.Millisecond
	// leaseGrace is how long a write goes on after the end of its context.
	leaseGrace = 500 * time.Millisecond

	// leaseFree is the text of a released lease. Otherwise the text is the owner's name.
	leaseFree = "free"
)

var errLease = errors.New("inboxnats: another process serves the stream now")

// lease is the lease of one session.
type lease struct {
	source *source

	mu    sync.Mutex
	rev   uint64
	until time.Time // end of the lease; zero: not taken
	left  bool      // it is not renewed any more
}

// lasts reports whether the session holds the lease.
func (l *lease) lasts() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.left && time.Now().Before(l.until)
}

// ended reports whether the session had the lease and did not extend it in time, as after a pause of the process.
func (l *lease) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.until.IsZero() && !time.Now().Before(l.until)
}

// take takes the lease if it has no owner, otherwise it waits a little.
func (l *lease) take(ctx context.Context) (taken bool, err error) {
	if l.ended() {
		return false, errLease
	}
	var before jetstream.RawStreamMsg
	if err := l.source.call(ctx, "lease", func(ctx context.Context) (err error) {
		before, err = l.last(ctx)
		return err
	}); err != nil {
		return false, err
	}
	if text := string(before.Data); before.Sequence > 0 && text != leaseFree && text != l.source.name {
		_ = runloop.Sleep(ctx, leaseEvery) // Receive checks ctx first
		return false, nil
	}
	err = l.write(ctx, before.Sequence, l.source.name)
	if isOvertaken(err) {
		return false, nil
	}
	return err == nil, err
}

// last returns the lease on the server. Without one the result is zero.
func (l *lease) last(ctx context.Context) (found jetstream.RawStreamMsg, err error) {
	stream, err := l.source.js.Stream(ctx, l.source.owners)
	if err != nil {
		return found, err
	}
	last, err := stream.GetLastMsgForSubject(ctx, l.source.owner)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return found, nil
	case err != nil:
		return found, err
	}
	return *last, nil
}

// write replaces the lease if it still has the number rev, or another one by this process, whose answer was lost or is on
// its way.
func (l *lease) write(ctx context.Context, rev uint64, text string) error {
	began := time.Now()
	ctx, cancel := runloop.Detach(ctx, leaseGrace)
	defer cancel()
	return l.source.call(ctx, "lease", func(ctx context.Context) error {
		replace := func(rev uint64) (*jetstream.PubAck, error) {
			return l.source.js.PublishMsg(ctx, &nats.Msg{Subject: l.source.owner, Data: []byte(text)}, jetstream.WithExpectLastSequencePerSubject(rev))
		}
		ack, err := replace(rev)
		if isOvertaken(err) {
			if last, failed := l.last(ctx); failed == nil && string(last.Data) == l.source.name {
				ack, err = replace(last.Sequence)
			}
		}
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

// renew extends the lease. An error means that the lease has ended.
func (l *lease) renew(ctx context.Context) error {
	l.mu.Lock()
	rev, held := l.rev, !l.until.IsZero() && !l.left
	l.mu.Unlock()
	if !held {
		return nil
	}
	err := l.write(ctx, rev, l.source.name)
	if isOvertaken(err) || !l.lasts() {
		return errLease
	}
	l.source.warn(ctx, "inbox: could not renew lease", err)
	return nil
}

// leave releases the lease. It does not wait for a renewal that is on its way.
func (l *lease) leave(ctx context.Context) error {
	held := l.lasts()
	l.mu.Lock()
	l.left = true
	rev := l.rev
	l.mu.Unlock()
	if !held {
		return nil
	}
	if err := l.write(ctx, rev, leaseFree); !isOvertaken(err) {
		return err
	}
	return nil
}

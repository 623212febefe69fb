package inboxredis

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// passPatience is for how long a partition that is to be passed on gets no new messages so that
	// those in hand end, and passAgain how long it is left alone where they have not.
	passPatience = 2 * time.Second
	passAgain    = 10 * time.Second
	passPoll     = 20 * time.Millisecond
)

// passOn gives the lease to whoever takes it, where this process has more than its share. It reports
// whether nothing is to be read. Until the last message in hand is settled nothing new is read, so
// that the next owner begins where this one has ended. A message that waits for its retry is not
// waited for: the others of the partition would stand still for as long.
func (r *ownerReader) passOn(ctx context.Context) (passing bool, err error) {
	now := time.Now()
	if r.since.IsZero() {
		if now.Before(r.notYet) || !r.share.pass() {
			return false, nil
		}
		r.since = now
	}
	if gone, err := r.release(ctx); gone || err != nil {
		return true, err
	}
	if now.Sub(r.since) < passPatience {
		_ = runloop.Sleep(ctx, passPoll)
		return true, nil
	}
	r.since, r.notYet = time.Time{}, now.Add(passAgain)
	r.share.passed()
	return false, nil
}

// release ends the lease if nothing is in hand. Meanwhile nothing is renewed: that would find the
// lease gone and end the session.
func (r *ownerReader) release(ctx context.Context) (gone bool, err error) {
	r.lease.Lock()
	defer r.lease.Unlock()
	if held, lost := r.hand.held(); lost || len(held) > 0 {
		return false, nil
	}
	if err := r.group.leave(context.WithoutCancel(ctx), r.name, r.name); err != nil {
		return false, r.group.fault("pass the partition on", err)
	}
	r.mu.Lock()
	r.until = time.Time{}
	r.mu.Unlock()
	r.over()
	r.group.log.InfoContext(ctx, "inbox: partition passed on")
	return true, nil
}

// over implements reader: the partition is not this session's any more.
func (r *ownerReader) over() {
	if r.counted {
		r.counted = false
		r.share.exit()
	}
	if !r.since.IsZero() {
		r.since = time.Time{}
		r.share.passed()
	}
}

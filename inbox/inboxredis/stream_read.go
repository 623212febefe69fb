package inboxredis

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// block is how long a read waits on the server. Receive ends within a second.
	block = 900 * time.Millisecond
	// claimEvery is how often a session looks for what has no owner, and for a lease that is over.
	claimEvery = time.Second
)

// turn says when to look for what has no owner.
type turn struct {
	last atomic.Pointer[time.Time] // nil: never. A clock that is set back does not hold it up
}

// look makes it time at once: something was given back.
func (t *turn) look() { t.last.Store(nil) }

// due reports whether it is time, and notes that.
func (t *turn) due() bool {
	now := time.Now()
	if last := t.last.Load(); last != nil && now.Sub(*last) < claimEvery {
		return false
	}
	t.last.Store(&now)
	return true
}

// groupReader shares the streams with other sessions.
type groupReader struct {
	turn

	group *group
	name  string
	from  cursors
}

// renews implements reader.
func (r *groupReader) renews(held int) bool { return held > 0 }

// renewed implements reader.
func (r *groupReader) renewed(time.Time) {}

// owns implements reader.
func (r *groupReader) owns() bool { return false }

// read implements reader. What has no owner comes first.
func (r *groupReader) read(ctx context.Context, most int) ([]entry, error) {
	if r.due() { // from the beginning also where the last look has not come to the end: something was given back
		r.from = fromBegin
	}
	if r.from != (cursors{}) {
		found, err := r.group.take(ctx, r.name, most, claimIdle, r.from)
		r.from = found.cursors
		if len(found.entries) > 0 || err != nil {
			return found.entries, err
		}
	}
	found, err := patiently(ctx, r.group, func(ctx context.Context) ([]redis.XStream, error) {
		return r.group.client.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: r.group.cfg.Group, Consumer: r.name, Count: int64(most), Block: block,
			Streams: []string{r.group.keys.retries(), r.group.keys.stream, ">", ">"},
		}).Result()
	})
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	var entries []entry
	for _, of := range found {
		for _, m := range of.Messages {
			entries = append(entries, entry{place: place{r.group.keys.index(of.Stream), m.ID}, fields: m.Values})
		}
	}
	return entries, r.group.fault("read", err)
}

// ownerReader has the streams to itself while it holds the lease.
type ownerReader struct {
	turn

	group *group
	name  string // and the token of the lease

	mu    sync.Mutex
	until time.Time // the lease lasts; zero: it is not this session's
	// Of the goroutine that reads.
	all   bool // that is pending is taken, as a new owner does
	from  cursors
	ends  [2]string // after these ids there was nothing new
	waits bool      // there was nothing
}

// renews implements reader.
func (r *ownerReader) renews(int) bool {
	taken, _ := r.holds()
	return taken
}

// renewed implements reader.
func (r *ownerReader) renewed(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = at.Add(claimIdle)
}

// owns implements reader.
func (r *ownerReader) owns() bool {
	_, lasts := r.holds()
	return lasts
}

// holds reports whether the lease was taken, and whether it lasts.
func (r *ownerReader) holds() (taken, lasts bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.until.IsZero(), time.Now().Before(r.until)
}

// read implements reader. A new owner takes all that is pending first, in order. New entries are
// read by a script, which sees that the lease is still held; the wait for them reads nothing.
func (r *ownerReader) read(ctx context.Context, most int) ([]entry, error) {
	taken, lasts := r.holds()
	switch {
	case !taken:
		return nil, r.acquire(ctx)
	case !lasts:
		return nil, errLease
	}
	idle := claimIdle
	r.all = r.all && r.from != cursors{}
	switch {
	case r.all:
		idle = 0
	case r.due():
		r.from = fromBegin
	case r.waits:
		if err := r.wait(ctx); err != nil {
			return nil, err
		}
	}
	found, err := r.group.take(ctx, r.name, most, idle, r.from)
	r.from, r.ends = found.cursors, found.ends
	r.waits = len(found.entries) == 0 && r.ends != [2]string{}
	return found.entries, err
}

// acquire takes the lease if it has no owner, else it waits.
func (r *ownerReader) acquire(ctx context.Context) error {
	began := time.Now()
	got, err := r.group.script(context.WithoutCancel(ctx), ownScript, []string{r.group.keys.owner()}, r.name, claimIdle.Milliseconds())
	if err != nil {
		return r.group.fault("take the lease", err)
	}
	if got == 0 {
		_ = runloop.Sleep(ctx, claimEvery) // its end is looked for first
		return nil
	}
	r.renewed(began)
	r.all, r.from = true, fromBegin
	return nil
}

// wait returns when there may be new entries.
func (r *ownerReader) wait(ctx context.Context) error {
	g := r.group
	_, err := patiently(ctx, g, func(ctx context.Context) ([]redis.XStream, error) {
		return g.client.XRead(ctx, &redis.XReadArgs{
			Streams: []string{g.keys.stream, g.keys.retries(), r.ends[0], r.ends[1]}, Count: 1, Block: block,
		}).Result()
	})
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return g.fault("wait for entries", err)
}

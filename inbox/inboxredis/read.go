package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// block is how long a read waits on the server. Receive ends within a second.
	block = 900 * time.Millisecond
	// claimEvery is the interval at which a session looks for entries without an owner, and for an expired lease.
	claimEvery = time.Second
)

// turn decides when to look for entries without an owner.
type turn struct {
	last atomic.Pointer[time.Time] // nil: never. A clock that is set back does not delay it
}

// look makes the next turn due at once, because entries were requeued.
func (t *turn) look() { t.last.Store(nil) }

// due reports whether it is time, and records that.
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

// read implements reader. Entries without an owner come first.
func (r *groupReader) read(ctx context.Context, most int) ([]entry, error) {
	if r.due() { // restart even if the last pass is not complete, because entries were requeued
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
			Group: r.group.cfg.ConsumerConfig.Name, Consumer: r.name, Count: int64(most), Block: block,
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

// ownerReader has the streams exclusively while it holds the lease.
type ownerReader struct {
	turn

	group *group
	name  string // also the token of the lease

	mu    sync.Mutex
	until time.Time // end of the lease; zero: this session does not hold it
	// Only the reading goroutine uses the fields below.
	all   bool // take all pending entries, as a new owner does
	from  cursors
	ends  [2]string // after these ids there was nothing new
	waits bool      // the last read found nothing
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

// holds reports whether the lease was taken, and whether it has not expired.
func (r *ownerReader) holds() (taken, lasts bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.until.IsZero(), time.Now().Before(r.until)
}

// read implements reader. A new owner first takes all pending entries, in order. A script reads new entries,
// because it checks the lease; the wait for new entries reads nothing.
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

// acquire takes the lease if nobody holds it; otherwise it waits.
func (r *ownerReader) acquire(ctx context.Context) error {
	began := time.Now()
	got, err := r.group.script(context.WithoutCancel(ctx), ownScript, []string{r.group.keys.owner()}, r.name, claimIdle.Milliseconds())
	if err != nil {
		return r.group.fault("take the lease", err)
	}
	if got == 0 {
		_ = runloop.Sleep(ctx, claimEvery) // the next call tries again
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

// cursors are the ids up to which the pending entries of both streams were examined; "": to the end.
type cursors [2]string

// fromBegin are the cursors at the start of a pass.
var fromBegin = cursors{"0-0", "0-0"}

// taken is the reply of stream_take.lua.
type taken struct {
	entries []entry
	cursors cursors
	ends    [2]string // after these ids there is nothing new
}

var errReply = errors.New("inboxredis: unexpected reply of a script")

// take runs the script for a session; an ordered session also gets new entries. The client must not repeat the
// script, and take ignores cancellation: entries of a lost reply would be skipped.
func (g *group) take(ctx context.Context, name string, most int, idle time.Duration, from cursors) (taken, error) {
	reply, err := within(context.WithoutCancel(ctx), g, func(ctx context.Context) (any, error) {
		return runOnce(ctx, g.client, takeScript, g.keys.read(),
			g.cfg.ConsumerConfig.Name, leaseToken(g.cfg, name), name, most, idle.Milliseconds(), from[0], from[1])
	})
	if err != nil {
		return taken{}, g.fault("read", err)
	}
	if stale, ok := reply.(int64); ok && stale == -1 {
		return taken{}, errLease
	}
	parts, ok := reply.([]any)
	if !ok || len(parts) != 7 {
		return taken{}, fmt.Errorf("%w: %T", errReply, reply)
	}
	deleted, _ := parts[4].(int64)
	g.deleted(ctx, int(deleted))
	old, err1 := parseEntries(parts[2], true)
	fresh, err2 := parseEntries(parts[3], false)
	return taken{
		entries: append(old, fresh...),
		cursors: cursors{text(parts[0]), text(parts[1])},
		ends:    [2]string{text(parts[5]), text(parts[6])},
	}, errors.Join(err1, err2)
}

func parseEntries(list any, redelivered bool) ([]entry, error) {
	items, ok := list.([]any)
	if !ok {
		return nil, fmt.Errorf("%w: %T", errReply, list)
	}
	entries := make([]entry, len(items))
	for i, item := range items {
		parts, _ := item.([]any)
		if len(parts) != 3 {
			return nil, errReply
		}
		stream, ok1 := parts[0].(int64)
		values, err := parseFields(parts[2])
		if !ok1 || err != nil || stream < 1 || stream > 2 {
			return nil, errReply
		}
		entries[i] = entry{place: place{int(stream - 1), text(parts[1])}, fields: values, redelivered: redelivered}
	}
	return entries, nil
}

// parseFields returns the fields of an entry by their names.
func parseFields(list any) (map[string]any, error) {
	fields, ok := list.([]any)
	if !ok || len(fields)%2 != 0 {
		return nil, errReply
	}
	values := make(map[string]any, len(fields)/2)
	for n := 0; n < len(fields); n += 2 {
		values[text(fields[n])] = fields[n+1]
	}
	return values, nil
}

func text(value any) string {
	s, _ := value.(string)
	return s
}

// pageGrowth is the growth of pages after each reply in time.
const pageGrowth = pageBytes / 256

// pages bounds the entries of one read. Redis limits entries, not bytes: a window of large entries would not
// arrive within the timeout, and would be requested again and again.
type pages struct {
	mu    sync.Mutex
	bytes int // target size of a page
	entry int // average size in the last page; 0: unknown
}

func newPages() *pages { return &pages{bytes: pageBytes} }

// next returns the number of entries to request, at most most.
func (p *pages) next(most int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.entry == 0 {
		return min(most, firstPage)
	}
	return min(most, max(p.bytes/p.entry, 1))
}

// came updates the sizes from a reply.
func (p *pages) came(entries []entry) {
	if len(entries) == 0 {
		return
	}
	size := 0
	for _, e := range entries {
		for name, value := range e.fields {
			size += len(name) + len(text(value))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.entry = max(size/len(entries), 1)
	p.bytes = min(p.bytes+pageGrowth, pageBytes)
}

// late records that a request timed out: the next page is half as large.
func (p *pages) late(asked int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes = max(p.bytes/2, 1)
	p.entry = max(p.entry, p.bytes/max(asked/2, 1), 1)
}

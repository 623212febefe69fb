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

// cursors are up to which ids the pending entries of both streams were looked at; "": to the end.
type cursors [2]string

// fromBegin are those of a look that begins.
var fromBegin = cursors{"0-0", "0-0"}

// taken is what stream_take.lua answers.
type taken struct {
	entries []entry
	cursors cursors
	ends    [2]string // after these ids there is nothing new
}

var errReply = errors.New("inboxredis: Redis answers a script otherwise than it should")

// take runs the script for a session; an ordered one gets new entries, too. The client must not
// repeat it, nor give it up with its context: the entries of an answer that was lost would be passed
// over.
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

// pageGrowth is by how much pages grow again with each that comes in time.
const pageGrowth = pageBytes / 256

// pages bound what one read asks for. Redis counts entries, not bytes: a window of large ones would
// not come within the timeout, and be asked for again and again.
type pages struct {
	mu    sync.Mutex
	bytes int // of a page
	entry int // how large an entry is, as far as the last page tells; 0: not known
}

func newPages() *pages { return &pages{bytes: pageBytes} }

// next is how many entries to ask for, at most so many.
func (p *pages) next(most int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.entry == 0 {
		return min(most, firstPage)
	}
	return min(most, max(p.bytes/p.entry, 1))
}

// came learns from entries that were read.
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

// late learns that so many did not come in time: the next page is half of that.
func (p *pages) late(asked int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes = max(p.bytes/2, 1)
	p.entry = max(p.entry, p.bytes/max(asked/2, 1), 1)
}

package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"time"
)

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
			g.cfg.Group, leaseToken(g.cfg, name), name, most, idle.Milliseconds(), from[0], from[1])
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

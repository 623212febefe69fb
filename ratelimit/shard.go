package ratelimit

import (
	"cmp"
	"sync"
)

// shard is one part of a Memory limiter's counters.
type shard struct {
	mu      sync.Mutex
	entries map[entryKey]entry
	limit   int
}

type entryKey struct{ name, key string }

func keyOf(c Charge) entryKey { return entryKey{c.Limit.Name, EncodeKey(c.Key)} }

// entry is a counter as it was at a time, in milliseconds, and when it will say
// the same as no entry at all.
type entry struct {
	value   Counter
	at      int64
	expires int64
}

// counter brings the entry forward to now. The zero entry counts nothing.
func (e entry) counter(l Limit, now int64) Counter {
	if e.expires <= now {
		return Counter{}
	}
	if l.Algorithm == TokenBucket {
		return Counter{Cur: drain(l, e.value.Cur, now-e.at)}
	}
	switch w := l.windowMS(); now/w - e.at/w {
	case 0:
		return e.value
	case 1:
		return Counter{Prev: e.value.Cur}
	}
	return Counter{}
}

// drain returns what is missing from a token bucket elapsed milliseconds after
// missing was; see Counter.
func drain(l Limit, missing, elapsed int64) int64 {
	if elapsed <= 0 {
		return missing
	}
	if elapsed > missing/l.Max {
		return 0
	}
	return missing - elapsed*l.Max
}

// store keeps a counter until it lapses.
func (s *shard) store(key entryKey, c Counter, l Limit, now int64) {
	expires := now + 2*l.windowMS() - now%l.windowMS()
	if l.Algorithm == TokenBucket {
		expires = now + ceilDiv(c.Cur, l.Max)
	}
	if _, known := s.entries[key]; !known && len(s.entries) >= s.limit {
		s.evict(now)
	}
	s.entries[key] = entry{value: c, at: now, expires: expires}
}

// evict makes room for at least one entry: what has lapsed goes, and if that is
// not enough an eighth of the shard, by a sample those that lapse soonest and,
// of these, count least. A flood of new keys so drops itself, not the counter
// that everybody shares.
func (s *shard) evict(now int64) {
	const sample = 8
	for key, e := range s.entries {
		if e.expires <= now {
			delete(s.entries, key)
		}
	}
	for goal := s.limit - s.limit/sample - 1; len(s.entries) > goal; {
		seen := 0
		var first entryKey
		var least entry
		for key, e := range s.entries {
			if seen == 0 || cmp.Or(cmp.Compare(e.expires, least.expires), cmp.Compare(e.value.Cur, least.value.Cur)) < 0 {
				first, least = key, e
			}
			if seen++; seen == sample {
				break
			}
		}
		delete(s.entries, first)
	}
}

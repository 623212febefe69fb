package ratelimit

import (
	"cmp"

	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

// counted is a stored counter.
type counted struct {
	value counter
	since int64 // in milliseconds: when the window began, or from when the bucket's value is
	rule  *rule // nil until it is set
}

// counter brings the counter forward to now, which is not before c.since, and returns how far into
// its window that is.
func (c *counted) counter(r *rule, now int64) (_ counter, elapsed int64) {
	if r.bucket() {
		return counter{Cur: r.drain(c.value.Cur, now-c.since)}, 0
	}
	switch elapsed = now - c.since; {
	case elapsed < r.w:
		return c.value, elapsed
	case elapsed < 2*r.w:
		return counter{Prev: c.value.Cur}, elapsed - r.w
	}
	return counter{}, now % r.w
}

func (c *counted) set(r *rule, value counter, at, elapsed int64) {
	c.value, c.since, c.rule = value, at-elapsed, r
}

// expires is when the counter says the same as none.
func (c *counted) expires() int64 {
	if c.rule.bucket() {
		return c.since + ceilDiv(c.value.Cur, c.rule.Max)
	}
	return c.since + 2*c.rule.w
}

// compare puts those first that lapse soonest and, of these, that count least: a flood of new keys
// drops itself, not the counter that everybody shares.
func (c *counted) compare(other *counted) int {
	return cmp.Or(cmp.Compare(c.expires(), other.expires()), cmp.Compare(c.value.Cur, other.value.Cur))
}

// known returns the counter that the very limit was charged to last.
func known(s *table.Shard[counted], hash uint64, key string, l *Limit) *table.Entry[counted] {
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		if at := &s.Slots[i]; at.Hash == hash && at.Entry.Value.rule.given == *l && at.Entry.Key == key {
			return at.Entry
		}
	}
	return nil
}

// shared returns the counter that the rule shares with others.
func shared(s *table.Shard[counted], hash uint64, key string, r *rule) *table.Entry[counted] {
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		if at := &s.Slots[i]; at.Hash == hash && at.Entry.Key == key && at.Entry.Value.rule.countsWith(r) {
			return at.Entry
		}
	}
	return nil
}

package ratelimit

import "cmp"

// counted is a stored counter.
type counted struct {
	value Counter
	since int64 // in milliseconds: when the window began, or the bucket's value was
	rule  *rule // nil until it is set
}

// counter brings the counter forward to now, which is not before c.since, and
// tells how far into its window that is.
func (c *counted) counter(r *rule, now int64) (_ Counter, elapsed int64) {
	if r.bucket() {
		return Counter{Cur: r.drain(c.value.Cur, now-c.since)}, 0
	}
	switch elapsed = now - c.since; {
	case elapsed < r.w:
		return c.value, elapsed
	case elapsed < 2*r.w:
		return Counter{Prev: c.value.Cur}, elapsed - r.w
	}
	return Counter{}, now % r.w
}

func (c *counted) set(r *rule, value Counter, at, elapsed int64) {
	c.value, c.since, c.rule = value, at-elapsed, r
}

// notAfter has a counter go on from a clock that was set back, with what it holds.
func (c *counted) notAfter(at int64) {
	if c.since > at {
		c.since = at - c.rule.elapsed(at)
	}
}

// expires is when the counter says the same as none.
func (c *counted) expires() int64 {
	if c.rule.bucket() {
		return c.since + ceilDiv(c.value.Cur, c.rule.Max)
	}
	return c.since + 2*c.rule.w
}

// compare puts those first that lapse soonest and, of these, that count least: a
// flood of new keys drops itself, not the counter that everybody shares.
func (c *counted) compare(other *counted) int {
	return cmp.Or(cmp.Compare(c.expires(), other.expires()), cmp.Compare(c.value.Cur, other.value.Cur))
}

// known returns the counter that the very limit was charged to last.
func known(s *shard[counted], hash uint64, key string, l *Limit) *entry[counted] {
	for i := s.home(hash); s.slots[i].entry != nil; i = s.next(i) {
		if at := &s.slots[i]; at.hash == hash && at.entry.value.rule.given == *l && at.entry.key == key {
			return at.entry
		}
	}
	return nil
}

// kindred returns the counter that the rule shares with others.
func kindred(s *shard[counted], hash uint64, key string, r *rule) *entry[counted] {
	for i := s.home(hash); s.slots[i].entry != nil; i = s.next(i) {
		if at := &s.slots[i]; at.hash == hash && at.entry.key == key && at.entry.value.rule.countsWith(r) {
			return at.entry
		}
	}
	return nil
}

// Package isolate finds, in memory, the items at fault among several that were tried together and
// failed: messages published in one window, messages or rows in one transaction, messages handled
// while a server seemed to be down. A [Search] returns the items to try together next, until each
// one at fault has failed alone.
//
// Two places need another way. The relay's lanes are shared by processes, and one SQL statement
// chooses them under leases. A search in the memory of one process would not bind the others
// (outbox/outboxpgx). A message that crashes the process must be remembered beyond that process, so
// the ledger of the inbox stores it (inbox/driver.Ledger).
package isolate

import (
	"container/list"
	"slices"
)

// Split is how to divide a group that failed.
type Split int

const (
	// Singles tries each key alone. It suits trials whose failure is expensive, such as a lost
	// connection, and whose success is cheap.
	Singles Split = iota
	// Halves tries two halves. It finds one key at fault among n in about log2(n) trials.
	Halves
)

// Search looks for the keys at fault. Make it with New, and set its fields before its first use. It
// has no clock and no goroutine. It is not safe for concurrent use.
type Search[K comparable] struct {
	// Strikes is how often a key must fail alone to be judged guilty. 0 means 1.
	Strikes int
	// Control counts a failure only after something that started later succeeded (see Controlled).
	// Without such a success, everything may be failing, not only the key.
	Control bool
	// Most bounds how many keys are remembered. Beyond it, the search forgets the keys that have
	// waited alone the longest. It keeps the last group added and groups of several keys; see Full.
	// 0 means no bound.
	Most int
	// InOrder tries the groups in the order in which they were added, and halves in the position of
	// the whole: successful keys keep their order. Without InOrder the largest group is next,
	// because it has the most innocent keys, and failed keys wait behind all others.
	InOrder bool

	split   Split
	groups  groups[K]
	records map[K]record
	onTrial []K    // failed alone, no control since; in the order of failures
	failed  uint64 // failures of single keys
}

// record holds the failures of a key that failed alone. Most keys have none.
type record struct {
	strikes int
	failed  uint64 // Search.failed at the failure on trial; 0: none
}

// New returns a search among keys that failed together. keys may be empty.
func New[K comparable](split Split, keys ...K) *Search[K] {
	s := &Search[K]{split: split, groups: newGroups[K](), records: map[K]record{}}
	s.Add(keys...)
	return s
}

// Add makes keys wait together for a trial, behind all others. Keys that are in other groups leave
// them. Their strikes are kept.
func (s *Search[K]) Add(group ...K) {
	if len(group) > 0 {
		s.groups.add(group, false)
		s.bound(group[len(group)-1])
	}
}

// bound forgets the keys beyond Most, but not the newest.
func (s *Search[K]) bound(newest K) {
	for s.Most > 0 && s.groups.len() > s.Most {
		oldest, ok := s.groups.oldestAlone(newest)
		if !ok {
			return
		}
		s.Clear(oldest)
	}
}

// Next returns the keys to try next, at most most keys of one group. Of equally large groups it
// picks the one that has waited the longest. It returns nil when none waits. The keys keep waiting
// until Clear, Failed or Add reports the outcome.
func (s *Search[K]) Next(most int) []K {
	g := s.groups.next(s.InOrder)
	if g == nil {
		return nil
	}
	return slices.Clone(g.keys[:min(most, len(g.keys))])
}

// Failed notes that keys were tried together and failed. Several keys are split. A single key is
// charged, and Failed reports whether it is guilty now. Next no longer returns a guilty key. The
// search remembers it until Clear, and judges it guilty at once if it is charged again.
func (s *Search[K]) Failed(group ...K) (guilty bool) {
	switch {
	case len(group) == 0:
		return false
	case len(group) == 1:
		s.again(group)
		return s.charge(group[0])
	case s.split == Halves:
		s.again(group[:len(group)/2], group[len(group)/2:])
	default:
		s.again(slices.Collect(slices.Chunk(group, 1))...)
	}
	return false
}

// again makes the parts of a failed group wait for another trial.
func (s *Search[K]) again(parts ...[]K) {
	for _, part := range parts {
		s.groups.add(part, s.InOrder)
		s.bound(part[len(part)-1])
	}
}

// charge records a failure of one key alone.
func (s *Search[K]) charge(k K) (guilty bool) {
	s.failed++
	if !s.Control {
		return s.strike(k)
	}
	if r := s.records[k]; r.failed == 0 {
		r.failed = s.failed
		s.records[k] = r
		s.onTrial = append(s.onTrial, k)
	}
	return false
}

// Mark returns the current position in the sequence of failures, for Controlled.
func (s *Search[K]) Mark() uint64 { return s.failed }

// Controlled notes a success of something that started at a Mark. Each key that had failed alone by
// then, and had no control since, gets a strike. It is returned as guilty, or as spared so far.
// Without Control there are no such keys. Report the keys that succeeded themselves with Clear
// first.
func (s *Search[K]) Controlled(began uint64) (guilty, spared []K) {
	n := 0
	for ; n < len(s.onTrial) && s.records[s.onTrial[n]].failed <= began; n++ {
		k := s.onTrial[n]
		if s.strike(k) {
			guilty = append(guilty, k)
		} else {
			spared = append(spared, k)
		}
	}
	s.onTrial = slices.Delete(s.onTrial, 0, n)
	return guilty, spared
}

// Outage notes that everything fails. Failures since the last control get no strike.
func (s *Search[K]) Outage() {
	for _, k := range s.onTrial {
		r := s.records[k]
		r.failed = 0
		s.records[k] = r
	}
	s.onTrial = nil
}

// Clear removes keys from the search, because they succeeded or no longer matter.
func (s *Search[K]) Clear(keys ...K) {
	for _, k := range keys {
		if !s.groups.remove(k) {
			continue
		}
		if s.records[k].failed > 0 {
			s.onTrial = slices.DeleteFunc(s.onTrial, func(other K) bool { return other == k })
		}
		delete(s.records, k)
	}
}

// Has reports whether the search remembers a key. Guilty keys count, too.
func (s *Search[K]) Has(k K) bool { return s.groups.has(k) }

// Struck reports whether a key has a strike.
func (s *Search[K]) Struck(k K) bool { return s.records[k].strikes > 0 }

// Rest returns all keys that wait for a trial.
func (s *Search[K]) Rest() []K { return s.groups.waiting() }

// Full reports whether Most keys wait in groups of several keys. Then only trials make room.
func (s *Search[K]) Full() bool { return s.Most > 0 && s.groups.len()-s.groups.alone >= s.Most }

// strike charges a key, and closes its group when it is guilty.
func (s *Search[K]) strike(k K) (guilty bool) {
	r := s.records[k]
	r.strikes, r.failed = r.strikes+1, 0
	s.records[k] = r
	if r.strikes < max(1, s.Strikes) {
		return false
	}
	s.groups.close(k)
	return true
}

// group holds keys that wait for a trial together, or one guilty key, which waits for none.
type group[K comparable] struct {
	keys   []K
	closed bool
}

// groups has each key in one group. The groups are in the order of their arrival.
type groups[K comparable] struct {
	order *list.List // of *group[K]
	place map[K]*list.Element
	alone int // groups of one key
}

func newGroups[K comparable]() groups[K] {
	return groups[K]{order: list.New(), place: map[K]*list.Element{}}
}

func (g *groups[K]) len() int { return len(g.place) }

func (g *groups[K]) has(k K) bool { return g.place[k] != nil }

// add moves keys into a new group: at the end, or in the position of the first key if inPlace is
// set.
func (g *groups[K]) add(keys []K, inPlace bool) {
	fresh := &group[K]{}
	element := g.order.PushBack(fresh)
	if old := g.place[keys[0]]; old != nil && inPlace {
		g.order.MoveBefore(element, old)
	}
	for _, k := range keys {
		if g.place[k] == element {
			continue // named twice
		}
		g.remove(k)
		g.place[k] = element
		fresh.keys = append(fresh.keys, k)
	}
	if len(fresh.keys) == 1 {
		g.alone++
	}
}

func (g *groups[K]) remove(k K) (had bool) {
	element := g.place[k]
	if element == nil {
		return false
	}
	delete(g.place, k)
	of := element.Value.(*group[K])
	of.keys = slices.DeleteFunc(of.keys, func(other K) bool { return other == k })
	switch len(of.keys) {
	case 0:
		g.order.Remove(element)
		g.alone--
	case 1:
		g.alone++
	}
	return true
}

// close excludes a key, which is alone in its group, from trials.
func (g *groups[K]) close(k K) { g.place[k].Value.(*group[K]).closed = true }

// next returns the group to try next; nil if none waits.
func (g *groups[K]) next(inOrder bool) (best *group[K]) {
	for element := g.order.Front(); element != nil; element = element.Next() {
		of := element.Value.(*group[K])
		switch {
		case of.closed:
		case inOrder:
			return of
		case best == nil || len(of.keys) > len(best.keys):
			best = of
		}
	}
	return best
}

// oldestAlone returns the key of the first group with a single key, except the group of newest.
func (g *groups[K]) oldestAlone(newest K) (k K, ok bool) {
	if g.alone == 0 {
		return k, false
	}
	for element := g.order.Front(); element != nil; element = element.Next() {
		if of := element.Value.(*group[K]); len(of.keys) == 1 && element != g.place[newest] {
			return of.keys[0], true
		}
	}
	return k, false
}

func (g *groups[K]) waiting() (keys []K) {
	for element := g.order.Front(); element != nil; element = element.Next() {
		if of := element.Value.(*group[K]); !of.closed {
			keys = append(keys, of.keys...)
		}
	}
	return keys
}

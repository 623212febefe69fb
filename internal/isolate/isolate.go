// Package isolate answers one question in memory: which of these is it? Several things were tried
// together and it went wrong: messages published in one window, messages or rows in one transaction,
// messages handled while a server seemed to be down. A [Search] says which to try together next,
// until each one at fault has failed alone.
//
// Two places need another way. The relay's lanes are shared by processes and chosen in one SQL
// statement under leases, so a search in the memory of one of them would not bind the others
// (outbox/outboxpgx). A message that ends the process must be remembered beyond that process, so
// the ledger of the inbox stores it (inbox/driver.Ledger).
package isolate

import (
	"container/list"
	"slices"
)

// Split says what becomes of a group that failed.
type Split int

const (
	// Singles tries each one alone. It is for trials whose failure is dear, such as a lost
	// connection, and whose success costs little.
	Singles Split = iota
	// Halves tries two halves. It finds one key at fault among n in about log2(n) trials.
	Halves
)

// Search looks for the keys at fault. Make it with New, and set its fields before its first use. It
// keeps no time and does nothing by itself; it is not safe for concurrent use.
type Search[K comparable] struct {
	// Strikes is how often a key must fail alone to be found guilty. 0 means 1.
	Strikes int
	// Control has a failure count only when something that began after it went well (see
	// Controlled): without that it may be everything that fails, not the key.
	Control bool
	// Most bounds how many keys are remembered: beyond it those are forgotten that have waited alone
	// for the longest. The last group added is kept, and so are groups of several; see Full. 0 means
	// no bound.
	Most int
	// InOrder tries the groups in the order in which they were added, and halves in the place of the
	// whole: it keeps the order of what goes well. Otherwise the largest group, and so the one with
	// the most that are not at fault, is next, and what failed waits behind all others.
	InOrder bool

	split   Split
	groups  groups[K]
	records map[K]record
	onTrial []K    // failed alone, not controlled since, the first to fail first
	failed  uint64 // how many failed alone
}

// record is what a search knows of a key that has failed alone. Most keys have none.
type record struct {
	strikes int
	failed  uint64 // the count of failures at the one on trial; 0: none
}

// New returns a search among keys that failed together, or none yet.
func New[K comparable](split Split, keys ...K) *Search[K] {
	s := &Search[K]{split: split, groups: newGroups[K](), records: map[K]record{}}
	s.Add(keys...)
	return s
}

// Add has keys wait for a trial together, behind all others. Keys of other groups leave these; what
// they are charged with is kept.
func (s *Search[K]) Add(group ...K) {
	if len(group) > 0 {
		s.groups.add(group, false)
		s.bound(group[len(group)-1])
	}
}

// bound forgets what is too much, but the newest.
func (s *Search[K]) bound(newest K) {
	for s.Most > 0 && s.groups.len() > s.Most {
		oldest, ok := s.groups.oldestAlone(newest)
		if !ok {
			return
		}
		s.Clear(oldest)
	}
}

// Next returns what to try next, at most that many keys of one group: of equally large ones, the one
// that has waited the longest. It is nil when none waits. The keys wait on until the outcome is
// reported by Clear, Failed or Add.
func (s *Search[K]) Next(most int) []K {
	g := s.groups.next(s.InOrder)
	if g == nil {
		return nil
	}
	return slices.Clone(g.keys[:min(most, len(g.keys))])
}

// Failed notes that keys were tried together and failed. Several are split. One alone is charged,
// and Failed reports whether that finds it guilty. Then Next no longer returns it. It is remembered
// until Clear, and charged again it is found guilty at once.
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

// again has the parts of a group that failed wait for another trial.
func (s *Search[K]) again(parts ...[]K) {
	for _, part := range parts {
		s.groups.add(part, s.InOrder)
		s.bound(part[len(part)-1])
	}
}

// charge notes a failure of one key alone.
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

// Mark returns the present moment, for Controlled.
func (s *Search[K]) Mark() uint64 { return s.failed }

// Controlled notes that something went well that began at a Mark. Each key that had failed alone by
// then, and was not controlled since, is charged: it is returned as guilty, or as spared so far.
// Without Control there is none. The keys that went well themselves are reported by Clear, first.
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

// Outage notes that everything fails: what failed since it was last controlled is not charged.
func (s *Search[K]) Outage() {
	for _, k := range s.onTrial {
		r := s.records[k]
		r.failed = 0
		s.records[k] = r
	}
	s.onTrial = nil
}

// Clear has keys leave the search: they went well, or are of no interest any more.
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

// Has reports whether the search knows a key, guilty ones included.
func (s *Search[K]) Has(k K) bool { return s.groups.has(k) }

// Struck reports whether a key has been charged before.
func (s *Search[K]) Struck(k K) bool { return s.records[k].strikes > 0 }

// Rest returns all keys that wait for a trial.
func (s *Search[K]) Rest() []K { return s.groups.waiting() }

// Full reports whether Most keys wait in groups of several: then room is made by trials alone.
func (s *Search[K]) Full() bool { return s.Most > 0 && s.groups.len()-s.groups.alone >= s.Most }

// strike charges a key, and sets it aside when it is guilty.
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

// group is keys that wait for a trial together, or one guilty key, which waits for none.
type group[K comparable] struct {
	keys   []K
	closed bool
}

// groups has each key in one group. The groups are in the order in which they came.
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

// add puts keys into a new group: at the end, or in their place if that is to be kept.
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

// close keeps the one key of a group from being tried.
func (g *groups[K]) close(k K) { g.place[k].Value.(*group[K]).closed = true }

// next is the group to try next, nil if none waits.
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

// oldestAlone is the only key of the first such group but that of the newest key.
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

package isolate

import (
	"container/list"
	"slices"
)

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

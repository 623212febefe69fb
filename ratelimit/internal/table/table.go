// Package table is a bounded hash table for many goroutines: for counters in memory, and for the denials that a
// limiter remembers.
package table

import (
	"hash/maphash"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
)

// shardCount is the number of bits in a set of shards.
const shardCount = 64

// Table holds a bounded number of values by key, for many goroutines. One call locks all shards that it uses
// together. A key may have several entries, which the caller distinguishes. Make it with New. It is not a map,
// because a map costs a third more time per decision at 100,000 keys.
type Table[V any] struct {
	seed   maphash.Seed
	shards [shardCount]Shard[V]
}

// Shard is a part of a table. All methods except Empty require its Mutex to be locked.
type Shard[V any] struct {
	sync.Mutex
	Slots []Slot[V]    // their number is a power of two; at most three quarters are in use
	count atomic.Int32 // changed under the Mutex
	most  int
	hand  int     // the slot after which the next eviction starts
	_     [8]byte // each shard has its own cache line
}

// Slot is a place for an entry, with its hash, so that skipping other entries costs no further memory access. An
// entry is in the first slot that was free, starting from its home.
type Slot[V any] struct {
	Hash  uint64
	Entry *Entry[V] // nil: the slot is free
}

// Entry is a value and its key.
type Entry[V any] struct {
	Key   string
	Value V
}

// New returns a table for at most that many entries, spread over 64 shards of equal size.
func New[V any](most int) *Table[V] {
	t := &Table[V]{seed: maphash.MakeSeed()}
	for i := range t.shards {
		t.shards[i].Slots = make([]Slot[V], 4)
		t.shards[i].most = max(1, most/shardCount)
	}
	return t
}

// Hash returns the hash of a key.
func (t *Table[V]) Hash(key string) uint64 { return maphash.String(t.seed, key) }

// Shard returns the shard of a hash.
func (t *Table[V]) Shard(hash uint64) *Shard[V] { return &t.shards[hash%shardCount] }

// Set is a set of shards.
type Set uint64

// SetOf returns the set with only the shard of a hash.
func SetOf(hash uint64) Set { return 1 << (hash % shardCount) }

// Lock locks shards in their order, so that two calls never deadlock.
func (t *Table[V]) Lock(s Set) {
	for ; s != 0; s &= s - 1 {
		t.shards[bits.TrailingZeros64(uint64(s))].Lock()
	}
}

// Unlock unlocks shards.
func (t *Table[V]) Unlock(s Set) {
	for ; s != 0; s &= s - 1 {
		t.shards[bits.TrailingZeros64(uint64(s))].Unlock()
	}
}

// Empty reports whether the shard has no entries. It needs no lock.
func (s *Shard[V]) Empty() bool { return s.count.Load() == 0 }

// Home returns the slot at which the search for a hash begins.
func (s *Shard[V]) Home(hash uint64) int { return int(hash / shardCount & uint64(len(s.Slots)-1)) }

// Next returns the slot at which a search continues.
func (s *Shard[V]) Next(i int) int { return (i + 1) & (len(s.Slots) - 1) }

// Insert adds an entry. If there is no room it samples a few entries and removes a spent one, or else the first one
// in order.
func (s *Shard[V]) Insert(hash uint64, key string, spent func(*V) bool, order func(a, b *V) int) *Entry[V] {
	if int(s.count.Load()) >= s.most {
		s.evict(spent, order)
	}
	if 4*(int(s.count.Load())+1) > 3*len(s.Slots) {
		s.double()
	}
	e := &Entry[V]{Key: strings.Clone(key)}
	s.put(Slot[V]{hash, e})
	s.count.Add(1)
	return e
}

func (s *Shard[V]) put(new Slot[V]) {
	i := s.Home(new.Hash)
	for s.Slots[i].Entry != nil {
		i = s.Next(i)
	}
	s.Slots[i] = new
}

func (s *Shard[V]) double() {
	old := s.Slots
	s.Slots = make([]Slot[V], 2*len(old))
	for _, each := range old {
		if each.Entry != nil {
			s.put(each)
		}
	}
}

// evict removes an entry. Each call samples a few other entries.
func (s *Shard[V]) evict(spent func(*V) bool, order func(a, b *V) int) {
	const sample = 8
	first := -1
	for seen, looked := 0, 0; seen < sample && looked < len(s.Slots); looked++ {
		s.hand = s.Next(s.hand)
		e := s.Slots[s.hand].Entry
		if e == nil {
			continue
		}
		seen++
		if spent(&e.Value) {
			s.Remove(s.hand)
			return
		}
		if first < 0 || order(&e.Value, &s.Slots[first].Entry.Value) < 0 {
			first = s.hand
		}
	}
	s.Remove(first)
}

// Remove empties a slot and moves later entries up if that brings them nearer to their home.
func (s *Shard[V]) Remove(gap int) {
	s.count.Add(-1)
	for i := s.Next(gap); s.Slots[i].Entry != nil; i = s.Next(i) {
		mask := len(s.Slots) - 1
		if (i-s.Home(s.Slots[i].Hash))&mask >= (i-gap)&mask {
			s.Slots[gap] = s.Slots[i]
			gap = i
		}
	}
	s.Slots[gap] = Slot[V]{}
}

// Len returns the number of entries.
func (t *Table[V]) Len() int {
	n := 0
	for i := range t.shards {
		n += int(t.shards[i].count.Load())
	}
	return n
}

// Each calls keep with every entry, its shard locked, and removes the entries for which keep returns false. It may
// visit an entry twice.
func (t *Table[V]) Each(keep func(key string, v *V) bool) {
	for n := range t.shards {
		s := &t.shards[n]
		s.Lock()
		for i := 0; i < len(s.Slots); {
			if e := s.Slots[i].Entry; e != nil && !keep(e.Key, &e.Value) {
				s.Remove(i) // another entry may have moved into the slot
				continue
			}
			i++
		}
		s.Unlock()
	}
}

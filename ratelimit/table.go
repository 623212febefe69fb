package ratelimit

import (
	"hash/maphash"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
)

// shardCount is the number of bits in a set of shards.
const shardCount = 64

// table holds values by key, at most so many, for many goroutines: the shards of
// all that one call touches are locked together. A key may have several entries,
// which the caller tells apart. It is a hash table of its own because a map costs
// a third more time per decision at 100,000 keys.
type table[V any] struct {
	seed   maphash.Seed
	shards [shardCount]shard[V]
}

type shard[V any] struct {
	mu    sync.Mutex
	slots []slot[V]    // as many as a power of two, at most three of four in use
	count atomic.Int32 // changed under mu
	most  int
	hand  int      // the slot that eviction looks at next
	_     [12]byte // a shard has a cache line of its own
}

// slot is a place for an entry, with its hash, so that passing by others costs no
// further memory access. An entry is in the first free slot from its home on.
type slot[V any] struct {
	hash  uint64
	entry *entry[V]
}

type entry[V any] struct {
	key   string
	value V
}

func newTable[V any](most int) *table[V] {
	t := &table[V]{seed: maphash.MakeSeed()}
	for i := range t.shards {
		t.shards[i].slots = make([]slot[V], 4)
		t.shards[i].most = max(1, most/shardCount)
	}
	return t
}

func (t *table[V]) hash(key string) uint64 { return maphash.String(t.seed, key) }

func (t *table[V]) shard(hash uint64) *shard[V] { return &t.shards[hash%shardCount] }

// set is a set of shards.
type set uint64

func setOf(hash uint64) set { return 1 << (hash % shardCount) }

// lock locks shards in their order, so that no two calls wait for each other.
func (t *table[V]) lock(s set) {
	for ; s != 0; s &= s - 1 {
		t.shards[bits.TrailingZeros64(uint64(s))].mu.Lock()
	}
}

func (t *table[V]) unlock(s set) {
	for ; s != 0; s &= s - 1 {
		t.shards[bits.TrailingZeros64(uint64(s))].mu.Unlock()
	}
}

// empty may be asked without the lock.
func (s *shard[V]) empty() bool { return s.count.Load() == 0 }

// home is where the search for a hash begins. The shard is locked, as in all
// that follows.
func (s *shard[V]) home(hash uint64) int { return int(hash / shardCount & uint64(len(s.slots)-1)) }

func (s *shard[V]) next(i int) int { return (i + 1) & (len(s.slots) - 1) }

// insert adds an entry. Where there is no room, those that are spent go, and if
// that is not enough the one of a few that order puts first.
func (s *shard[V]) insert(hash uint64, key string, spent func(*V) bool, order func(a, b *V) int) *entry[V] {
	if int(s.count.Load()) >= s.most {
		s.evict(spent, order)
	}
	if 4*(int(s.count.Load())+1) > 3*len(s.slots) {
		s.double()
	}
	e := &entry[V]{key: strings.Clone(key)}
	s.put(slot[V]{hash, e})
	s.count.Add(1)
	return e
}

func (s *shard[V]) put(new slot[V]) {
	i := s.home(new.hash)
	for s.slots[i].entry != nil {
		i = s.next(i)
	}
	s.slots[i] = new
}

func (s *shard[V]) double() {
	old := s.slots
	s.slots = make([]slot[V], 2*len(old))
	for _, each := range old {
		if each.entry != nil {
			s.put(each)
		}
	}
}

// evict makes room: it looks at a few entries, others each time.
func (s *shard[V]) evict(spent func(*V) bool, order func(a, b *V) int) {
	const sample = 8
	first := -1
	for seen, looked := 0, 0; seen < sample && looked < len(s.slots); looked++ {
		s.hand = s.next(s.hand)
		e := s.slots[s.hand].entry
		if e == nil {
			continue
		}
		seen++
		if spent(&e.value) {
			s.remove(s.hand)
			return
		}
		if first < 0 || order(&e.value, &s.slots[first].entry.value) < 0 {
			first = s.hand
		}
	}
	s.remove(first)
}

// remove empties a slot and moves those behind it up that may be nearer home.
func (s *shard[V]) remove(gap int) {
	s.count.Add(-1)
	for i := s.next(gap); s.slots[i].entry != nil; i = s.next(i) {
		mask := len(s.slots) - 1
		if (i-s.home(s.slots[i].hash))&mask >= (i-gap)&mask {
			s.slots[gap] = s.slots[i]
			gap = i
		}
	}
	s.slots[gap] = slot[V]{}
}

func (t *table[V]) len() int {
	n := 0
	for i := range t.shards {
		n += int(t.shards[i].count.Load())
	}
	return n
}

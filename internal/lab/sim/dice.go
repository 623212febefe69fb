package sim

import (
	"math/rand/v2"
	"time"
)

// dice decide what happens in a schedule. What is rolled under a label does not depend on what is rolled under
// others, so that a fault that is left out changes nothing but what follows from it.
type dice struct{ seed uint64 }

// roll returns a number for the n-th time under a label.
func (d dice) roll(label string, n uint64) roll { return d.rollFor(label, "", n) }

// rollFor is roll for a label of two parts.
func (d dice) rollFor(label, part string, n uint64) roll {
	x := d.seed ^ hash(label) ^ mix(hash(part)) ^ n*0x9e3779b97f4a7c15
	return roll(mix(mix(x) + n))
}

// hash is FNV-1a.
func hash(text string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	return h
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// rand returns a source of its own for a label.
func (d dice) rand(label string) *rand.Rand { return rand.New(rand.NewPCG(d.seed, hash(label))) }

// roll is one throw, from which several independent numbers can be had.
type roll uint64

// next returns another throw.
func (r roll) next() roll { return roll(mix(uint64(r) + 0x9e3779b97f4a7c15)) }

// below returns a number from 0 to n-1.
func (r roll) below(n int) int { return int(uint64(r) % uint64(n)) }

// float returns a number from [0, 1).
func (r roll) float() float64 { return float64(uint64(r)>>11) / (1 << 53) }

// between returns a duration from [low, high).
func (r roll) between(low, high time.Duration) time.Duration {
	return low + time.Duration(r.float()*float64(high-low))
}

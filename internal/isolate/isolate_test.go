package isolate_test

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/holdfast-go/holdfast/internal/isolate"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// each runs a check with random numbers. A failure names the seed.
func each(t *testing.T, check func(t *testing.T, r *rand.Rand)) {
	t.Helper()
	t.Parallel()
	for seed := range uint64(testenv.Sequences(t, 60)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { check(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

// numbers returns 0 to n-1 and which of them are at fault.
func numbers(r *rand.Rand, n, guilty int) (keys []int, bad map[int]bool) {
	bad = map[int]bool{}
	for k := range n {
		keys = append(keys, k)
	}
	for _, k := range r.Perm(n)[:min(n, guilty)] {
		bad[k] = true
	}
	return keys, bad
}

// The search finds each key at fault in few trials, and no other key.
func TestSearch_findsFaultyKeys(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand) {
		n, most := 1+r.IntN(300), 1+r.IntN(300)
		keys, bad := numbers(r, n, r.IntN(8))
		split := isolate.Split(r.IntN(2))
		s := isolate.New(split, keys...)
		s.Strikes, s.InOrder = r.IntN(4), r.IntN(2) == 0
		strikes := max(1, s.Strikes)
		allowed := strikes + bits.Len(uint(min(n, most)-1)) // log2, rounded up
		if split == isolate.Singles {
			allowed = strikes + 1
		}
		trials, found, passed := map[int]int{}, map[int]bool{}, []int{}
		for {
			group := s.Next(most)
			if group == nil {
				break
			}
			if len(group) > most {
				t.Fatalf("%d to try, at most %d are wanted", len(group), most)
			}
			for _, k := range group {
				trials[k]++
			}
			if !slices.ContainsFunc(group, func(k int) bool { return bad[k] }) {
				s.Clear(group...)
				passed = append(passed, group...)
				continue
			}
			if s.Failed(group...) {
				found[group[0]] = true
			}
		}
		for _, k := range keys {
			switch {
			case found[k] != bad[k]:
				t.Errorf("%d of %d: found guilty %v, is %v", k, n, found[k], bad[k])
			case bad[k] && (trials[k] > allowed || !s.Has(k)):
				t.Errorf("%d of %d was in %d trials of at most %d; known %v", k, n, trials[k], allowed, s.Has(k))
			case !bad[k] && s.Has(k):
				t.Errorf("%d of %d went well and is still suspected", k, n)
			}
		}
		if s.InOrder && !slices.IsSorted(passed) {
			t.Errorf("out of order: %v", passed)
		}
		if rest := s.Rest(); len(rest) > 0 || s.Known() != len(found) {
			t.Errorf("%v wait, %d are known of %d guilty", rest, s.Known(), len(found))
		}
	})
}

// world runs several messages at a time, each alone, through outages in which all of them fail.
type world struct {
	r       *rand.Rand
	s       *isolate.Search[int]
	bad     map[int]bool
	running []trial
	down    bool
	found   map[int]bool
}

type trial struct {
	key  int
	mark uint64
}

func (w *world) begin(key int) { w.running = append(w.running, trial{key, w.s.Mark()}) }

// endAny ends a random trial, not always the oldest.
func (w *world) endAny(t *testing.T) {
	t.Helper()
	w.end(t, w.r.IntN(len(w.running)))
}

func (w *world) endLast(t *testing.T) {
	t.Helper()
	w.end(t, len(w.running)-1)
}

func (w *world) end(t *testing.T, at int) {
	t.Helper()
	run := w.running[at]
	w.running = slices.Delete(w.running, at, at+1)
	if w.down || w.bad[run.key] {
		if w.s.Failed(run.key) {
			t.Errorf("%d is guilty, and nothing else went well since it failed", run.key)
		}
		return
	}
	w.s.Clear(run.key)
	guilty, spared := w.s.Controlled(run.mark)
	for _, k := range guilty {
		w.found[k] = true
		if !w.bad[k] {
			t.Errorf("%d is innocent", k)
		}
	}
	for _, k := range spared {
		if !w.s.Struck(k) {
			t.Errorf("%d is spared and not charged", k)
		}
	}
}

// A key that fails during an outage is not judged guilty. A key that fails while others succeed is.
func TestOutages(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand) {
		n := 3 + r.IntN(30)
		keys, bad := numbers(r, n, r.IntN(3))
		w := &world{r: r, s: isolate.New[int](isolate.Singles), bad: bad, found: map[int]bool{}}
		w.s.Strikes, w.s.Control = 2, true
		for range 20 {
			w.down = false
			for range 4 * n { // each gets its turn
				w.begin(keys[r.IntN(n)])
				if len(w.running) > 8 {
					w.endAny(t)
				}
			}
			for round := range 2 * n { // an innocent key charged at the end of an outage succeeds before the next outage
				w.begin(keys[round%n])
				w.endLast(t)
			}
			w.down = true
			for len(w.running) > 0 { // trials from before
				w.endAny(t)
			}
			for range r.IntN(3 * n) {
				w.begin(keys[r.IntN(n)])
				w.endLast(t)
			}
			if r.IntN(2) == 0 {
				w.s.Outage()
				if guilty, spared := w.s.Controlled(w.s.Mark()); len(guilty)+len(spared) > 0 {
					t.Errorf("an outage leaves %v and %v on trial", guilty, spared)
				}
			}
		}
		for k := range bad {
			if !w.found[k] {
				t.Errorf("%d is at fault and was not found", k)
			}
		}
	})
}

// A failure counts only after something that started later succeeded.
func TestControl(t *testing.T) {
	t.Parallel()
	s := isolate.New[string](isolate.Singles)
	s.Strikes, s.Control = 2, true
	before := s.Mark()
	if s.Failed("a") {
		t.Error("guilty without a control")
	}
	if guilty, spared := s.Controlled(before); guilty != nil || spared != nil {
		t.Errorf("a success that started before the failure is not a control: %v, %v", guilty, spared)
	}
	if guilty, spared := s.Controlled(s.Mark()); guilty != nil || !slices.Equal(spared, []string{"a"}) || !s.Struck("a") {
		t.Errorf("after one strike: guilty %v, spared %v", guilty, spared)
	}
	if _, spared := s.Controlled(s.Mark()); spared != nil {
		t.Error("one failure is charged twice")
	}
	s.Failed("a")
	s.Failed("a")
	if guilty, _ := s.Controlled(s.Mark()); !slices.Equal(guilty, []string{"a"}) {
		t.Errorf("after two strikes: guilty %v", guilty)
	}
	if s.Next(1) != nil || !s.Has("a") {
		t.Error("a guilty one is tried again, or forgotten")
	}
	s.Failed("a")
	if guilty, _ := s.Controlled(s.Mark()); !slices.Equal(guilty, []string{"a"}) {
		t.Error("a guilty one that fails again is not guilty")
	}
	s.Clear("a")
	if s.Has("a") || s.Struck("a") || s.Known() != 0 {
		t.Error("a successful key is remembered")
	}
}

// model is the simplest possible search by halves.
type model struct{ groups [][]int }

func (m *model) clear(keys ...int) {
	for i := range m.groups {
		m.groups[i] = slices.DeleteFunc(slices.Clone(m.groups[i]), func(k int) bool { return slices.Contains(keys, k) })
	}
	m.groups = slices.DeleteFunc(m.groups, func(g []int) bool { return len(g) == 0 })
}

func (m *model) add(keys ...int) {
	m.clear(keys...)
	if len(keys) > 0 {
		m.groups = append(m.groups, keys)
	}
}

func (m *model) next(most int) []int {
	var best []int
	for _, g := range m.groups {
		if len(g) > len(best) {
			best = g
		}
	}
	return best[:min(most, len(best))]
}

// Keys come and go, and wait in groups that other keys leave. The largest group is next, then the
// oldest.
func TestOrder(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand) {
		s, m := isolate.New[int](isolate.Halves), &model{}
		s.Control = true
		for range 200 {
			some := r.Perm(40)[:r.IntN(12)]
			switch r.IntN(4) {
			case 0:
				s.Add(some...)
				m.add(some...)
			case 1:
				s.Clear(some...)
				m.clear(some...)
			case 2:
				s.Failed(some...)
				m.add(some[:len(some)/2]...)
				m.add(some[len(some)/2:]...)
			case 3:
				most := 1 + r.IntN(12)
				if got, want := s.Next(most), m.next(most); !slices.Equal(got, want) {
					t.Fatalf("next is %v, want %v of %v", got, want, m.groups)
				}
			}
			if got, want := s.Rest(), slices.Concat(m.groups...); !slices.Equal(got, want) {
				t.Fatalf("%v wait, want %v", got, m.groups)
			}
		}
	})
}

// Beyond Most, keys without a reported outcome are forgotten: the oldest first, groups last.
func TestSearch_forgetsBeyondMost(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand) {
		s := isolate.New[int](isolate.Singles)
		s.Most, s.Control, s.Strikes, s.InOrder = 1+r.IntN(50), r.IntN(2) == 0, 2, r.IntN(2) == 0
		for k := range 500 {
			s.Failed(k)
			if r.IntN(3) == 0 {
				s.Controlled(s.Mark())
			}
			if r.IntN(9) == 0 {
				s.Failed(k)
			}
			if s.Known() > s.Most {
				t.Fatalf("%d are known, at most %d wanted", s.Known(), s.Most)
			}
			if !s.Has(k) || k > s.Most && s.Has(k-s.Most) {
				t.Fatalf("the newest is known: %v, the oldest is forgotten: %v", s.Has(k), !s.Has(k-s.Most))
			}
		}
	})
	s := isolate.New(isolate.Halves, 1, 2, 3)
	s.Most = 3
	s.Add(4)
	s.Add(5)
	if !s.Full() || s.Has(4) || !slices.Equal(s.Rest(), []int{1, 2, 3, 5}) {
		t.Errorf("%v wait, full: %v", s.Rest(), s.Full())
	}
	s.Failed(1, 2, 3)
	if s.Full() {
		t.Errorf("%v wait, and single ones could be forgotten", s.Rest())
	}
}

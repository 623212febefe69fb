// Package trace checks that a run of the code is a run of a model in internal/lab/models. Recorders around the
// interfaces of the drivers note each call with its result, so that the code itself has no hooks. The acceptors in
// lanes and parked have the transitions of the models with their names. They refuse a run that the model does not
// allow.
package trace

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Step is a transition of a model: it returns the possible states after a call, given the state before it and the
// call's result. It returns none if the model does not allow the call in that state. It must not change the state.
type Step[S any] func(S) []S

// Log has the recorded calls of a run, of all processes. It is safe for concurrent use.
type Log[S any] struct {
	names []string

	mu    sync.Mutex
	now   int
	calls []call[S]
}

// call is a recorded call. Its transition takes place at one moment between from and to.
type call[S any] struct {
	part, name, text string
	from, to         int
	step             Step[S]
}

// never is the end of a call without an answer. It may take effect at any later time, or never.
const never = int(^uint(0) >> 1)

// New returns an empty log for the transitions with these names.
func New[S any](names ...string) *Log[S] { return &Log[S]{names: names} }

// Now returns the present moment, for the start of a call. No two moments are the same.
func (l *Log[S]) Now() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now++
	return l.now
}

// Add records a call that started at from and has ended now. Part is the independent part of the state that it
// concerns, such as a lane. Text describes the call in an error.
func (l *Log[S]) Add(part, name, text string, from int, step Step[S]) {
	l.add(call[S]{part, name, text, from, 0, step})
}

// AddOpen is Add for a call without an answer.
func (l *Log[S]) AddOpen(part, name, text string, from int, step Step[S]) {
	l.add(call[S]{part, name, text, from, never, step})
}

func (l *Log[S]) add(c call[S]) {
	if !slices.Contains(l.names, c.name) {
		panic("trace: unknown transition " + c.name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.to == 0 {
		l.now++
		c.to = l.now
	}
	l.calls = append(l.calls, c)
}

// Counts returns how many calls of each transition the log has.
func (l *Log[S]) Counts() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := map[string]int{}
	for _, c := range l.calls {
		n[c.name]++
	}
	return n
}

// Check returns an error if the model does not allow the calls in any order that agrees with their times, or if it
// cannot be done afterwards. Each part begins in the state initial. All calls must have ended.
func (l *Log[S]) Check(initial S, done func(S) bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	parts := map[string][]call[S]{}
	for _, c := range l.calls {
		parts[c.part] = append(parts[c.part], c)
	}
	for part, calls := range parts {
		if err := check(calls, initial, done); err != nil {
			return fmt.Errorf("trace: %s: %w", part, err)
		}
	}
	return nil
}

// world is a possible state at a moment, with the running calls whose transition has already taken place.
type world[S any] struct {
	state S
	taken []int // sorted
}

func (w world[S]) id() string { return fmt.Sprint(w) }

// check follows all possible states from one end of a call to the next one. Between two ends the running calls may
// take effect in any order.
func check[S any](calls []call[S], initial S, done func(S) bool) error {
	type end struct{ at, call int }
	var moments []end // positive calls start, negative ones end
	for i, c := range calls {
		moments = append(moments, end{c.from, i})
		if c.to != never {
			moments = append(moments, end{c.to, ^i})
		}
	}
	slices.SortFunc(moments, func(a, b end) int { return a.at - b.at })
	worlds, running := []world[S]{{state: initial}}, []int{}
	for _, m := range moments {
		if m.call >= 0 {
			running = append(running, m.call)
			continue
		}
		ended := ^m.call
		var after []world[S]
		for _, w := range spread(worlds, calls, running, ended) {
			if at, found := slices.BinarySearch(w.taken, ended); found {
				after = append(after, world[S]{w.state, slices.Delete(slices.Clone(w.taken), at, at+1)})
			}
		}
		if len(after) == 0 {
			return refusal(calls, ended, worlds)
		}
		worlds = unique(after)
		running = slices.DeleteFunc(running, func(i int) bool { return i == ended })
	}
	if !slices.ContainsFunc(spread(worlds, calls, running, never), func(w world[S]) bool { return done(w.state) }) {
		return fmt.Errorf("the run ends in %v", worlds[0].state)
	}
	return nil
}

// spread returns the worlds that can be reached by transitions of running calls. Where target has taken place, nothing
// else needs to happen before its end.
func spread[S any](worlds []world[S], calls []call[S], running []int, target int) []world[S] {
	seen := map[string]bool{}
	all := slices.Clone(worlds)
	for _, w := range all {
		seen[w.id()] = true
	}
	for next := 0; next < len(all); next++ {
		w := all[next]
		if slices.Contains(w.taken, target) {
			continue
		}
		for _, i := range running {
			at, found := slices.BinarySearch(w.taken, i)
			if found {
				continue
			}
			for _, state := range calls[i].step(w.state) {
				reached := world[S]{state, slices.Insert(slices.Clone(w.taken), at, i)}
				if id := reached.id(); !seen[id] {
					seen[id] = true
					all = append(all, reached)
				}
			}
		}
	}
	return all
}

func unique[S any](worlds []world[S]) []world[S] {
	if len(worlds) == 1 {
		return worlds
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(worlds, func(w world[S]) bool {
		id := w.id()
		defer func() { seen[id] = true }()
		return seen[id]
	})
}

// refusal describes the call that is not allowed, with the calls before it.
func refusal[S any](calls []call[S], refused int, worlds []world[S]) error {
	c := calls[refused]
	var before []call[S]
	for _, b := range calls {
		if b.to < c.to {
			before = append(before, b)
		}
	}
	slices.SortFunc(before, func(a, b call[S]) int { return a.to - b.to })
	const shown = 12
	var text strings.Builder
	for _, b := range before[max(0, len(before)-shown):] {
		fmt.Fprintf(&text, "\n\t%d-%d %s %s", b.from, b.to, b.name, b.text)
	}
	return fmt.Errorf("the model does not allow %s %s (%d-%d) in %v, after%s", c.name, c.text, c.from, c.to, worlds[0].state, text.String())
}

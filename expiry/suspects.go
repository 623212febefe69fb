package expiry

import (
	"slices"
	"sync"
	"time"
)

// suspects are the rows that a sweep passes by: those set aside because one of
// them made a batch fail, and those found to be it, which are in quarantine.
type suspects struct {
	period time.Duration // of the quarantine
	limit  int           // of rows in quarantine

	mu    sync.Mutex
	aside []group   // each the rows of a failed batch
	bad   []badRow  // the next to be released first
	until time.Time // when to try again what is set aside
}

// group is rows of which one may be at fault.
type group struct {
	rows []string
	bad  bool // one row that was in quarantine before
}

type badRow struct {
	id    string
	until time.Time
}

func newSuspects(period time.Duration, limit int) *suspects {
	return &suspects{period: period, limit: limit}
}

// skip are the ids of all suspects.
func (s *suspects) skip() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, g := range s.aside {
		ids = append(ids, g.rows...)
	}
	for _, row := range s.bad {
		ids = append(ids, row.id)
	}
	return ids
}

// setAside puts rows behind those that wait already.
func (s *suspects) setAside(rows []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(rows) > 0 {
		s.aside = append(s.aside, group{rows: rows})
	}
}

// waiting counts the rows set aside.
func (s *suspects) waiting() (rows int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.aside {
		rows += len(g.rows)
	}
	return rows
}

// makeRoom reports whether fewer than limit rows wait, for which it forgets rows
// that wait by themselves: all that tells them from others that are due is that
// the search for them is over.
func (s *suspects) makeRoom(limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := 0
	for _, g := range s.aside {
		rows += len(g.rows)
	}
	s.aside = slices.DeleteFunc(s.aside, func(g group) bool {
		forget := rows >= limit && len(g.rows) == 1
		if forget {
			rows--
		}
		return forget
	})
	return rows < limit
}

// next are the rows to be tried next, at most n of them, and whether it is one that
// was in quarantine before. They stay set aside until take.
func (s *suspects) next(n int) (rows []string, bad bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.aside) == 0 {
		return nil, false
	}
	g := s.aside[s.largest()]
	return g.rows[:min(n, len(g.rows))], g.bad
}

// take removes the n rows that next returned.
func (s *suspects) take(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.largest()
	if g := &s.aside[at]; n < len(g.rows) {
		g.rows = g.rows[n:]
		return
	}
	s.aside = slices.Delete(s.aside, at, at+1)
}

// largest is the place of the group to be tried next: of those with the most rows,
// and so with the most that are not at fault, the one that has waited longest.
func (s *suspects) largest() int {
	at := 0
	for i, g := range s.aside {
		if len(g.rows) > len(s.aside[at].rows) {
			at = i
		}
	}
	return at
}

// rest has what is set aside wait until then.
func (s *suspects) rest(until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = until
}

func (s *suspects) resting(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.until.After(now)
}

// isolate puts a row in quarantine. When that is full it takes the place of the
// one that has been there longest, which is tried again early.
func (s *suspects) isolate(id string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.bad) >= s.limit {
		s.bad = s.bad[1:]
	}
	s.bad = append(s.bad, badRow{id, now.Add(s.period)})
}

// release sets rows whose quarantine has ended aside, each by itself: one that
// is still bad then fails alone.
func (s *suspects) release(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.bad) > 0 && !s.bad[0].until.After(now) {
		s.aside = append(s.aside, group{rows: []string{s.bad[0].id}, bad: true})
		s.bad = s.bad[1:]
	}
}

// due returns how long from now there is something to try again, and false if
// there are no suspects.
func (s *suspects) due(now time.Time) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(s.aside) > 0:
		return max(0, s.until.Sub(now)), true
	case len(s.bad) > 0:
		return s.bad[0].until.Sub(now), true
	}
	return 0, false
}

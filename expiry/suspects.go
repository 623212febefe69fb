package expiry

import (
	"maps"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/isolate"
)

// suspects are the rows that a sweep passes by: those set aside because one of
// them made a batch fail, and those found to be it, which are in quarantine.
type suspects struct {
	period time.Duration // of the quarantine
	limit  int           // of rows in quarantine

	mu    sync.Mutex
	aside *isolate.Search[string]
	again map[string]bool // rows set aside that were in quarantine before
	bad   []badRow        // the next to be released first
	until time.Time       // when to try again what is set aside
}

type badRow struct {
	id    string
	until time.Time
}

// newSuspects returns none. limit bounds the rows set aside, too: beyond it those that wait by
// themselves are forgotten, since all that tells them from others that are due is that the search
// for them is over.
func newSuspects(period time.Duration, limit int) *suspects {
	aside := isolate.New[string](isolate.Halves)
	aside.Most = limit
	return &suspects{period: period, limit: limit, aside: aside, again: map[string]bool{}}
}

// skip are the ids of all suspects.
func (s *suspects) skip() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := s.aside.Rest()
	for _, row := range s.bad {
		ids = append(ids, row.id)
	}
	return ids
}

// setAside puts rows behind those that wait already.
func (s *suspects) setAside(rows []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(rows)
	s.aside.Add(rows...)
}

// clear has rows no longer wait.
func (s *suspects) clear(rows []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(rows)
}

func (s *suspects) forget(rows []string) {
	s.aside.Clear(rows...)
	for _, id := range rows {
		delete(s.again, id)
	}
}

// divide has those to blame for a failed batch wait in halves.
func (s *suspects) divide(tried, blamed []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(tried)
	s.aside.Failed(blamed...)
}

// crowded reports whether as many rows are set aside as may be.
func (s *suspects) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.aside.Rest()) >= s.limit
}

// full reports whether that is so although rows that wait by themselves are forgotten.
func (s *suspects) full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aside.Full()
}

// next are the rows to be tried next, at most n of them, and whether it is one that
// was in quarantine before. They stay set aside.
func (s *suspects) next(n int) (rows []string, again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows = s.aside.Next(n)
	return rows, len(rows) == 1 && s.again[rows[0]]
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
	s.forget([]string{id})
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
		s.aside.Add(s.bad[0].id)
		s.again[s.bad[0].id] = true
		s.bad = s.bad[1:]
	}
	maps.DeleteFunc(s.again, func(id string, _ bool) bool { return !s.aside.Has(id) })
}

// due returns how long from now there is something to try again, and false if
// there are no suspects.
func (s *suspects) due(now time.Time) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.aside.Next(1) != nil:
		return max(0, s.until.Sub(now)), true
	case len(s.bad) > 0:
		return s.bad[0].until.Sub(now), true
	}
	return 0, false
}

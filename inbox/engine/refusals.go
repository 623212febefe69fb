package engine

import (
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

const (
	// refusalAge is how long a refusal is remembered. The messages concerned come again before
	// that, if they are this consumer's.
	refusalAge = maxSlot + 15*time.Second

	// refusalLog is how often the log names one place.
	refusalLog = 30 * time.Second

	// slot is the distance in time of messages that come again. Their handlers run for nothing,
	// as long as the place is not mended, and share the workers with the others.
	slot = 50 * time.Millisecond

	// maxSlot bounds how far apart many messages come again.
	maxSlot = time.Minute
)

// displacements are the pauses of one message while nothing takes copies: 1 s growing to 5 s.
var displacements = backoff.Policy{Base: time.Second, Max: 5 * time.Second}

// refusals knows the places that take no failed messages: they are missing, full or closed to us.
type refusals struct {
	places map[string]refusal
	inARow int
	next   time.Time // the first free slot
}

type refusal struct {
	err          error
	last, logged time.Time
}

// note remembers that a place refused a copy, and reports whether to log it.
func (f *refusals) note(place string, err error, now time.Time) (log bool) {
	if f.places == nil {
		f.places = map[string]refusal{}
	}
	logged := f.places[place].logged
	if log = now.Sub(logged) > refusalLog; log {
		logged = now
	}
	f.places[place] = refusal{err, now, logged}
	f.inARow++
	return log
}

// clear notes that a place takes copies, and reports whether it refused them.
func (f *refusals) clear(place string) (known bool) {
	if len(f.places) == 0 {
		return false
	}
	if _, known = f.places[place]; known {
		delete(f.places, place)
		f.inARow, f.next = 0, time.Time{}
	}
	return known
}

// pause is how long the next message stays away.
func (f *refusals) pause(now time.Time) time.Duration {
	if f.next.Before(now) {
		f.next = now
	}
	f.next = f.next.Add(slot)
	return min(max(f.next.Sub(now), displacements.Delay(f.inARow-1, 0)), maxSlot)
}

// latest is the place that has refused a copy last, empty for none, and until when that counts.
func (f *refusals) latest() (place string, until time.Time, err error) {
	if len(f.places) == 0 {
		return "", time.Time{}, nil
	}
	for name, refused := range f.places {
		if refused.last.After(until) {
			place, until, err = name, refused.last, refused.err
		}
	}
	return place, until.Add(refusalAge), err
}

package pgnotify

import "time"

// maxPause is how long a database that is away is left alone: it may be back at any time.
const maxPause = 2 * time.Second

// complaintInterval is the least time between two complaints about one fault.
const complaintInterval = time.Minute

// seldom is when something was last said. The zero value: never.
type seldom struct{ at time.Time }

// again reports whether it is time to say it again, and takes it as said then.
func (s *seldom) again() bool {
	if now := time.Now(); s.at.IsZero() || now.Sub(s.at) >= complaintInterval {
		s.at = now
		return true
	}
	return false
}

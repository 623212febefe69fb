package inboxamqp

import (
	"sync/atomic"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// maxSlack bounds by how many bytes silent connections prolong the patience with further ones.
const maxSlack = 128 << 20

// silence knows how long a broker may be silent: as long as what may be on its way takes.
type silence struct {
	largest atomic.Int64 // body that was received, in bytes
	slack   atomic.Int64 // more bytes that may be on their way
}

// pending is how much may be on its way from the broker before it answers a question.
func (s *silence) pending() int { return int(2*s.largest.Load() + s.slack.Load()) }

// received notes the size of a body.
func (s *silence) received(size int) {
	if int64(size) > s.largest.Load() {
		s.largest.Store(int64(size))
	}
}

// note gives the next connection more time than one on which nothing came before the broker
// seemed to be silent: it may have been sending a large message over a slow line, and would never
// get it through.
func (s *silence) note(silent bool) {
	if !silent {
		s.slack.Store(0)
		return
	}
	s.slack.Store(min(2*s.slack.Load()+driver.MaxBodyBytes, maxSlack))
}

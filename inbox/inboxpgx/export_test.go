package inboxpgx

import (
	"time"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
)

// Entries returns the store of entries.
func (s *Store) Entries() driver.Entries { return s.entries }

// Hasten shortens the lease of stopped keys, which matters after a crash, and the interval of checks for
// them.
func (s *Store) Hasten(lease, poll time.Duration) { s.parks.lease, s.parks.poll = lease, poll }

package inboxpgx

import (
	"time"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
)

// Entries is where the store keeps its entries.
func (s *Store) Entries() driver.Entries { return s.entries }

// Hasten shortens how long stopped keys wait after a crash, and how often they are looked at.
func (s *Store) Hasten(lease, poll time.Duration) { s.parks.lease, s.parks.poll = lease, poll }

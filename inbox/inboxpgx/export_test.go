package inboxpgx

import "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"

// Entries is where the store keeps its entries.
func (s *Store) Entries() driver.Entries { return s.entries }

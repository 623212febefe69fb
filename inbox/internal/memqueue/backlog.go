package memqueue

import (
	"context"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Backlog implements driver.Measured.
func (s *Source) Backlog(ctx context.Context) (driver.Backlog, error) {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	return driver.Backlog{Waiting: len(s.queue.ready), Retrying: s.queue.waiting - s.queue.putOff, PutOff: s.queue.putOff}, ctx.Err()
}

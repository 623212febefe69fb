package joined

import (
	"context"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Backlog implements driver.Measured: it is that of all parts that count.
func (s *Source) Backlog(ctx context.Context) (sum driver.Backlog, err error) {
	all := make([]driver.Backlog, len(s.parts))
	err = each(len(s.parts), func(i int) (err error) {
		if part, ok := s.parts[i].(driver.Measured); ok {
			all[i], err = part.Backlog(ctx)
		}
		return err
	})
	for _, b := range all {
		sum.Waiting, sum.Retrying, sum.PutOff = sum.Waiting+b.Waiting, sum.Retrying+b.Retrying, sum.PutOff+b.PutOff
	}
	return sum, err
}

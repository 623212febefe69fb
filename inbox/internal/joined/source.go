// Package joined makes one source of several, such as the partitions of a stream: one run of the
// engine then serves all of them, with one window, one set of workers and one set of limits.
package joined

import (
	"cmp"
	"context"
	"errors"
	"sync"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

var errForeign = errors.New("a delivery of another source")

// Source is a driver.Source and a driver.Keeper that delivers what its parts do, in their order as
// far as it comes from one part. Its session is one of each: it begins when all have begun, and the
// end of one ends it.
type Source struct{ parts []driver.Source }

var (
	_ driver.Source = (*Source)(nil)
	_ driver.Keeper = (*Source)(nil)
)

// New joins sources, at least one, whose traits are the same. They belong to it from now on.
func New(parts ...driver.Source) *Source { return &Source{parts} }

// Traits implements driver.Source.
func (s *Source) Traits() driver.Traits { return s.parts[0].Traits() }

// Open implements driver.Source.
func (s *Source) Open(ctx context.Context) (driver.Session, error) {
	parts := make([]driver.Session, len(s.parts))
	err := each(len(parts), func(i int) (err error) {
		parts[i], err = s.parts[i].Open(ctx)
		return err
	})
	if err == nil {
		return newSession(s, parts), nil
	}
	_ = each(len(parts), func(i int) error { // the reason of the first is told
		if parts[i] == nil {
			return nil
		}
		return parts[i].Close(ctx)
	})
	return nil, err
}

// Move implements driver.Source. Each part moves its own, all at the same time.
func (s *Source) Move(ctx context.Context, moves []driver.Move) []error {
	results := make([]error, len(moves))
	own, at := make([][]driver.Move, len(s.parts)), make([][]int, len(s.parts))
	for i, m := range moves {
		d, ok := m.Delivery.(*delivery)
		if !ok || d.session.source != s {
			results[i] = errForeign
			continue
		}
		m.Delivery = d.Delivery
		own[d.part], at[d.part] = append(own[d.part], m), append(at[d.part], i)
	}
	_ = among(own, func(part int) error {
		for k, err := range s.parts[part].Move(ctx, own[part]) {
			i := at[part][k]
			results[i] = err
			d := moves[i].Delivery.(*delivery)
			d.session.moved(d, err)
		}
		return nil
	})
	return results
}

// Run implements driver.Source.
func (s *Source) Run(ctx context.Context) {
	_ = each(len(s.parts), func(i int) error {
		s.parts[i].Run(ctx)
		return nil
	})
}

// Ready implements driver.Source.
func (s *Source) Ready(ctx context.Context) error {
	return each(len(s.parts), func(i int) error { return s.parts[i].Ready(ctx) })
}

// DeadLetters implements driver.Keeper. Those of parts that keep none are not among them.
func (s *Source) DeadLetters() driver.DeadLetters {
	var all []driver.DeadLetters
	for _, part := range s.parts {
		if keeper, ok := part.(driver.Keeper); ok {
			all = append(all, keeper.DeadLetters())
		}
	}
	return driver.JoinDeadLetters(all...)
}

// among calls do for the parts that have something, as each does.
func among[T any](own [][]T, do func(part int) error) error {
	var busy []int
	for part, list := range own {
		if len(list) > 0 {
			busy = append(busy, part)
		}
	}
	return each(len(busy), func(k int) error { return do(busy[k]) })
}

// each calls do for all parts at once, waits for them, and returns the error of the first that has
// one: they often fail of one cause.
func each(n int, do func(int) error) error {
	if n == 1 {
		return do(0)
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
	return cmp.Or(errs...)
}

package joined

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Letters are the dead letters of several places as those of one, place by place.
func Letters(places ...driver.Letters) driver.Letters { return letters(places) }

type letters []driver.Letters

// Depths implements driver.Letters.
func (l letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	all := make([][]driver.Depth, len(l))
	if err := each(len(l), func(i int) (err error) {
		all[i], err = l[i].Depths(ctx)
		return err
	}); err != nil {
		return nil, err
	}
	var sums []driver.Depth
	for _, depth := range slices.Concat(all...) {
		i, there := slices.BinarySearchFunc(sums, depth, func(a, b driver.Depth) int { return strings.Compare(a.Class, b.Class) })
		if !there {
			sums = slices.Insert(sums, i, depth)
			continue
		}
		sum := &sums[i]
		if sum.Messages == 0 || depth.Messages > 0 && depth.Oldest.Before(sum.Oldest) {
			sum.Oldest = depth.Oldest
		}
		sum.Messages += depth.Messages
		sum.Held = sum.Held || depth.Held
	}
	return sums, nil
}

// Scan implements driver.Letters.
func (l letters) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Fate, error), failed func(inbox.DeadLetter, error),
) error {
	done := false
	noting := func(dead *inbox.DeadLetter) (driver.Fate, error) {
		fate, err := visit(dead)
		done = errors.Is(err, driver.ErrDone)
		return fate, err
	}
	var held error
	for _, place := range l {
		err := place.Scan(ctx, class, noting, failed)
		if errors.Is(err, inbox.ErrHeld) {
			held, err = err, nil
		}
		if err != nil || done {
			return cmp.Or(err, held)
		}
	}
	return held
}

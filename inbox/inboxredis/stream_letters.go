package inboxredis

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	// pageBytes and maxPage bound what one page of dead letters holds, as far as the largest letter so far tells.
	// Redis counts letters, not bytes: a page is at most twice as long as the page before.
	pageBytes = 4 << 20
	maxPage   = 32
	firstPage = 8
)

// letters are the dead letters of a group: driver.Letters.
type letters struct{ group *group }

// Depths implements driver.Letters.
func (l *letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	classes := driver.AllClasses(l.group.cfg.Classes)
	depths := make([]driver.Depth, len(classes))
	for i, class := range classes {
		key := l.group.keys.dead(l.group.cfg.DeadLetterPrefix, class)
		depths[i].Class = class
		n, err := within(ctx, l.group, func(ctx context.Context) (int64, error) { return l.group.client.XLen(ctx, key).Result() })
		if err != nil {
			return nil, l.group.fault("count dead letters", err)
		}
		if depths[i].Messages = int(n); n == 0 {
			continue
		}
		first, err := within(ctx, l.group, func(ctx context.Context) ([]redis.XMessage, error) {
			return l.group.client.XRangeN(ctx, key, "-", "+", 1).Result()
		})
		if err != nil {
			return nil, l.group.fault("count dead letters", err)
		}
		if len(first) > 0 {
			depths[i].Oldest = timeOf(first[0].ID)
		}
	}
	return depths, nil
}

// timeOf is when an entry was added, by the server's clock.
func timeOf(id string) time.Time {
	millis, _, _ := strings.Cut(id, "-")
	n, err := strconv.ParseInt(millis, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(n)
}

// Scan implements driver.Letters.
func (l *letters) Scan(ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Fate, error), failed func(inbox.DeadLetter, error)) error {
	key := l.group.keys.dead(l.group.cfg.DeadLetterPrefix, class)
	last, err := within(ctx, l.group, func(ctx context.Context) ([]redis.XMessage, error) {
		return l.group.client.XRevRangeN(ctx, key, "+", "-", 1).Result()
	})
	if err != nil || len(last) == 0 {
		return l.group.fault("read dead letters", err)
	}
	size, largest := int64(firstPage), 0
	for after := "-"; ; {
		page, err := within(ctx, l.group, func(ctx context.Context) ([]redis.XMessage, error) {
			return l.group.client.XRangeN(ctx, key, after, last[0].ID, size).Result()
		})
		if err != nil || len(page) == 0 {
			return l.group.fault("read dead letters", err)
		}
		for _, m := range page {
			letter := readDead(m.Values, l.group.keys.stream, class, l.group.cfg.symfony)
			largest = max(largest, len(letter.Message.Body))
			body := letter.Message.Body
			fate, err := visit(&letter)
			switch {
			case errors.Is(err, driver.ErrDone):
				return nil
			case err != nil:
				return err
			}
			switch err := l.settle(ctx, key, m, fate, body, letter.Message.Body); {
			case errors.Is(err, driver.ErrUnavailable):
				failed(letter, err)
				return err
			case err != nil:
				failed(letter, err)
			}
		}
		after = "(" + page[len(page)-1].ID
		size = min(2*size, maxPage, max(1, int64(pageBytes/max(largest, 1))))
	}
}

// settle does what was decided of a letter, whose body was one and is another. A letter that is gone was
// returned or deleted by somebody else.
func (l *letters) settle(ctx context.Context, key string, m redis.XMessage, fate driver.Fate, was, is []byte) error {
	if fate == driver.Keep {
		return nil
	}
	fields := m.Values
	if fate == driver.Return && !bytes.Equal(was, is) {
		var err error
		if fields, err = edited(fields, was, is); err != nil {
			return err
		}
	}
	_, err := within(ctx, l.group, func(ctx context.Context) (any, error) {
		if fate == driver.Drop {
			return doOnce(ctx, l.group.client, "xdel", key, m.ID)
		}
		return runOnce(ctx, l.group.client, returnScript, []string{key, l.group.keys.retries()}, append([]any{m.ID}, replayCopy(fields)...)...)
	})
	if err != nil {
		return classify(err)
	}
	return nil
}

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
	"github.com/holdfast-go/holdfast/internal/inbox/record"
)

const (
	// pageBytes bounds the bytes of one read, after its first entry.
	pageBytes = 4 << 20
	// maxPage is the largest number of dead letters in a page, and firstPage the number of entries in a session's
	// first read.
	maxPage   = 100
	firstPage = 8
)

// letters implements driver.DeadLetters for a group.
type letters struct{ group *group }

// Depths implements driver.DeadLetters.
func (l *letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	classes := driver.AllClasses(l.group.cfg.Classes)
	depths := make([]driver.Depth, len(classes))
	for i, class := range classes {
		key := l.group.keys.dead(l.group.cfg.DeadLetterPrefix, class)
		depths[i].Class = class
		counted, err := l.ask(ctx, depthScript, key)
		if err != nil {
			return nil, l.group.fault("count dead letters", err)
		}
		n, _ := counted[0].(int64)
		depths[i].Messages, depths[i].Oldest = int(n), timeOf(text(counted[1]))
	}
	return depths, nil
}

// ask runs a read-only script that returns a pair.
func (l *letters) ask(ctx context.Context, script *redis.Script, key string, args ...any) ([]any, error) {
	pair, err := within(ctx, l.group, func(ctx context.Context) ([]any, error) {
		return script.Run(ctx, l.group.client, []string{key}, args...).Slice()
	})
	if err == nil && len(pair) != 2 {
		err = errReply
	}
	return pair, err
}

// page returns the dead letters after an id, and the last id of the scan, which the first page determines.
func (l *letters) page(ctx context.Context, key, after, last string) (page []redis.XMessage, end string, err error) {
	pair, err := l.ask(ctx, pageScript, key, after, last, pageBytes, maxPage)
	if err != nil {
		return nil, "", err
	}
	entries, ok := pair[1].([]any)
	if !ok {
		return nil, "", errReply
	}
	for _, e := range entries {
		parts, _ := e.([]any)
		if len(parts) != 2 {
			return nil, "", errReply
		}
		values, err := parseFields(parts[1])
		if err != nil {
			return nil, "", err
		}
		page = append(page, redis.XMessage{ID: text(parts[0]), Values: values})
	}
	return page, text(pair[0]), nil
}

// timeOf returns the time when an entry was added, by the server's clock.
func timeOf(id string) time.Time {
	millis, _, _ := strings.Cut(id, "-")
	n, err := strconv.ParseInt(millis, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(n)
}

// Scan implements driver.DeadLetters.
func (l *letters) Scan(ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error)) error {
	key, last := l.group.keys.dead(l.group.cfg.DeadLetterPrefix, class), ""
	for after := "-"; ; {
		page, end, err := l.page(ctx, key, after, last)
		if err != nil || len(page) == 0 {
			return l.group.fault("read dead letters", err)
		}
		last = end
		for _, m := range page {
			dead := read(m.Values, l.group.cfg.symfony)
			dead.Queue = l.group.keys.stream
			letter := record.ReadDead(dead, class, in(m.Values))
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
	}
}

// settle applies the outcome to a dead letter. was and is are its body before and after editing. If the dead
// letter no longer exists, another call returned or deleted it.
func (l *letters) settle(ctx context.Context, key string, m redis.XMessage, fate driver.Outcome, was, is []byte) error {
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
	reply, err := within(ctx, l.group, func(ctx context.Context) (any, error) {
		if fate == driver.Drop {
			return doOnce(ctx, l.group.client, "xdel", key, m.ID)
		}
		return runOnce(ctx, l.group.client, returnScript, []string{key, l.group.keys.retries()}, append([]any{m.ID}, copied(fields, record.Replayed(in(fields)))...)...)
	})
	if err != nil {
		return classify(err)
	}
	if n, _ := reply.(int64); n == 0 {
		return driver.ErrGone
	}
	return nil
}

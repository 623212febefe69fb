package inboxredis

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// retrying implements driver.DeadLetters for the messages of a group that wait for a time. They are members of sorted
// sets, whose scores are the due times. A member begins with its mark, the stream and the id of the entry that failed.
type retrying struct{ group *group }

// Retrying implements driver.Delayer.
func (s *source) Retrying() driver.DeadLetters { return &retrying{s.group} }

// Retrying returns the messages that wait for their next attempt, or that a handler has put off, with the methods of
// dead letters: Replay makes an attempt due now, or after Replay.Delay, within a second. Attempts stay. Each call reads the
// messages page by page. An ordered consumer delays its messages in the process, and they are not listed.
func (c *Consumer) Retrying() inbox.DeadLetters {
	parts := []driver.DeadLetters{}
	for _, g := range c.groups {
		parts = append(parts, &retrying{g})
	}
	return driver.NewRetrying(driver.JoinDeadLetters(parts...), c.cfg.memory.Retention, c.cfg.Logger)
}

// Depths implements driver.DeadLetters.
func (r *retrying) Depths(ctx context.Context) (depths []driver.Depth, err error) {
	for _, class := range []string{driver.WaitingPutOff, driver.WaitingRetry} {
		n, err := within(ctx, r.group, func(ctx context.Context) (int64, error) { return r.group.client.ZCard(ctx, r.key(class)).Result() })
		if err != nil {
			return nil, r.group.fault("count waiting messages", err)
		}
		depths = append(depths, driver.Depth{Class: class, Messages: int(n)})
	}
	return depths, nil
}

func (r *retrying) key(class string) string {
	return r.group.keys.waiting(class == driver.WaitingPutOff)
}

// waitingEntry is a member of a sorted set.
type waitingEntry struct {
	due, mark string
	fields    map[string]any
}

// waitingCursor is the position of a scan: the last message of a page.
type waitingCursor struct {
	due       string
	beginning string // of its member; "": there are no more messages, or it is the first page
	last      string // due time of the last message of the scan
}

// page returns the messages after a position, and advances it.
func (r *retrying) page(ctx context.Context, key string, at *waitingCursor) (page []waitingEntry, err error) {
	reply, err := within(ctx, r.group, func(ctx context.Context) ([]any, error) {
		return waitingScript.Run(ctx, r.group.client, []string{key}, at.due, at.beginning, at.last, pageBytes, maxPage).Slice()
	})
	if err != nil {
		return nil, err
	}
	if len(reply) != 3 {
		return nil, errReply
	}
	entries, ok := reply[1].([]any)
	if !ok {
		return nil, errReply
	}
	for _, e := range entries {
		parts, _ := e.([]any)
		if len(parts) != 3 {
			return nil, errReply
		}
		fields, err := parseFields(parts[2])
		if err != nil {
			return nil, err
		}
		at.due = text(parts[0])
		page = append(page, waitingEntry{at.due, text(parts[1]), fields})
	}
	at.last, at.beginning = text(reply[0]), text(reply[2])
	return page, nil
}

// Scan implements driver.DeadLetters.
func (r *retrying) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	key, at := r.key(class), &waitingCursor{due: "-inf"}
	seen := map[string]bool{} // a postponed message may come once more
	for {
		page, err := r.page(ctx, key, at)
		if err != nil {
			return r.group.fault("read waiting messages", err)
		}
		for _, e := range page {
			if seen[e.mark] {
				continue
			}
			seen[e.mark] = true
			err := r.look(ctx, key, class, e, visit, failed)
			if errors.Is(err, driver.ErrDone) {
				return nil
			}
			if err != nil {
				return err
			}
		}
		if at.beginning == "" {
			return nil
		}
	}
}

// look visits a message and applies the outcome.
func (r *retrying) look(
	ctx context.Context, key, class string, e waitingEntry, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	m := read(e.fields, r.group.cfg.symfony)
	m.Queue = r.group.keys.stream
	ms, _ := strconv.ParseFloat(e.due, 64) // a score is a number
	found := driver.NewWaiting(m, class, time.UnixMilli(int64(ms)))
	outcome, err := visit(&found)
	if err != nil || outcome == driver.Keep {
		return err
	}
	delay := ""
	if outcome == driver.Return {
		delay = millis(time.Until(found.DueAt))
	}
	if err = r.change(ctx, key, e, delay); err != nil {
		failed(found, err)
	}
	if errors.Is(err, driver.ErrUnavailable) {
		return err
	}
	return nil
}

// change makes a message due after a delay, or removes it if the delay is "".
func (r *retrying) change(ctx context.Context, key string, e waitingEntry, delay string) error {
	reply, err := within(ctx, r.group, func(ctx context.Context) (any, error) {
		return runOnce(ctx, r.group.client, postponeScript, []string{key}, e.due, e.mark, delay)
	})
	if err != nil {
		return classify(err)
	}
	if n, _ := reply.(int64); n == 0 {
		return driver.ErrGone
	}
	return nil
}

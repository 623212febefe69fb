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
	return driver.NewRetrying(driver.JoinDeadLetters(parts...), c.cfg.retention, c.cfg.Logger)
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

// waitingCursor is the position of a scan: a due time, and how many visited messages of that time are still there.
type waitingCursor struct {
	due  string
	kept int
	last string // due time of the last message of the scan
}

// page returns the messages at a position.
func (r *retrying) page(ctx context.Context, key string, at *waitingCursor) (page []waitingEntry, err error) {
	pair, err := within(ctx, r.group, func(ctx context.Context) ([]any, error) {
		return waitingScript.Run(ctx, r.group.client, []string{key}, at.due, at.kept, at.last, pageBytes, maxPage).Slice()
	})
	if err != nil {
		return nil, err
	}
	if len(pair) != 2 {
		return nil, errReply
	}
	entries, ok := pair[1].([]any)
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
		page = append(page, waitingEntry{text(parts[0]), text(parts[1]), fields})
	}
	at.last = text(pair[0])
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
		if err != nil || len(page) == 0 {
			return r.group.fault("read waiting messages", err)
		}
		for _, e := range page {
			if e.due != at.due {
				at.due, at.kept = e.due, 0
			}
			if seen[e.mark] {
				at.kept++
				continue
			}
			seen[e.mark] = true
			stays, err := r.look(ctx, key, class, e, visit, failed)
			switch {
			case errors.Is(err, driver.ErrDone):
				return nil
			case err != nil:
				return err
			case stays:
				at.kept++
			}
		}
	}
}

// look visits a message and applies the outcome. It reports whether the message keeps its due time.
func (r *retrying) look(
	ctx context.Context, key, class string, e waitingEntry, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) (stays bool, err error) {
	m := read(e.fields, r.group.cfg.symfony)
	m.Queue = r.group.keys.stream
	ms, _ := strconv.ParseFloat(e.due, 64) // a score is a number
	found := driver.NewWaiting(m, class, time.UnixMilli(int64(ms)))
	outcome, err := visit(&found)
	if err != nil || outcome == driver.Keep {
		return true, err
	}
	delay := ""
	if outcome == driver.Return {
		delay = millis(time.Until(found.DueAt))
	}
	switch err := r.change(ctx, key, e, delay); {
	case errors.Is(err, driver.ErrUnavailable):
		failed(found, err)
		return true, err
	case errors.Is(err, driver.ErrGone):
		failed(found, err)
		return false, nil
	case err != nil:
		failed(found, err)
		return true, nil
	}
	return false, nil
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

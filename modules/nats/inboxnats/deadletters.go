package inboxnats

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/inbox/record"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
)

// letters implements driver.DeadLetters for a consumer or one of its partitions.
type letters struct{ *source }

// open returns the stream of the dead letters, or nil if it does not exist.
func (l *letters) open(ctx context.Context) (stream jetstream.Stream, err error) {
	err = l.call(ctx, "dead letters", func(ctx context.Context) (err error) {
		stream, err = l.js.Stream(ctx, l.dead)
		return err
	})
	if errors.Is(err, driver.ErrMissing) {
		return nil, nil
	}
	return stream, err
}

// after returns the first dead letter on a subject from a number on, or nil if there is none.
func (l *letters) after(ctx context.Context, stream jetstream.Stream, subject string, seq uint64) (found *jetstream.RawStreamMsg, err error) {
	err = l.call(ctx, "read dead letters", func(ctx context.Context) (err error) {
		found, err = stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil
		}
		return err
	})
	return found, err
}

// Depths implements driver.DeadLetters.
func (l *letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	stream, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	counts := map[string]uint64{}
	if stream != nil {
		info, err := l.stat(ctx, l.dead, l.letters+">")
		if err != nil {
			return nil, err
		}
		counts = info.State.Subjects
	}
	var all []driver.Depth
	for _, class := range driver.AllClasses(l.Classes) {
		subject := l.letter(l.places, class)
		depth := driver.Depth{Class: class, Messages: int(counts[subject])}
		if depth.Messages > 0 {
			oldest, err := l.after(ctx, stream, subject, 1)
			if err != nil {
				return nil, err
			}
			if oldest != nil {
				depth.Oldest = oldest.Time
			}
		}
		all = append(all, depth)
	}
	return all, nil
}

// Scan implements driver.DeadLetters.
func (l *letters) Scan(ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error)) error {
	stream, err := l.open(ctx)
	if err != nil || stream == nil {
		return err
	}
	subject, last := l.letter(l.places, class), stream.CachedInfo().State.LastSeq
	for seq := uint64(1); seq <= last; seq++ {
		found, err := l.after(ctx, stream, subject, seq)
		if err != nil || found == nil || found.Sequence > last {
			return err
		}
		seq = found.Sequence
		all := form.Decode(found.Header)
		dead := record.ReadDead(read(all, found.Data, l.queue, l.symfony), class, in(all))
		body := dead.Message.Body
		outcome, err := visit(&dead)
		switch {
		case errors.Is(err, driver.ErrDone):
			return nil
		case err != nil:
			return err
		case outcome == driver.Keep:
			continue
		}
		if outcome == driver.Return {
			err = l.put(ctx, found, all, body, dead.Message.Body)
		}
		if err == nil { // of several calls for a letter, the one that deletes it counts it
			err = l.delete(ctx, stream, found.Sequence)
		}
		if err != nil {
			failed(dead, err)
		}
		if errors.Is(err, driver.ErrUnavailable) {
			return err
		}
	}
	return nil
}

// put returns a dead letter to the stream. Its Nats-Msg-Id is that of no other message, because the server would drop
// it. It is the same in each scan, so the server drops the second copy if two scans return the letter, or if the first
// one could not delete it.
func (l *letters) put(ctx context.Context, found *jetstream.RawStreamMsg, all map[string]string, was, is []byte) error {
	body := found.Data
	if !bytes.Equal(was, is) {
		if !bytes.Equal(was, found.Data) { // it was unpacked
			return driver.ErrNotEditable
		}
		body = is
	}
	sent, err := l.send(&copied{
		subject: l.later, body: body, all: copyHeaders(all, record.Replayed(in(all))),
		id: fmt.Sprintf("%s.%d.%d", l.dead, found.Sequence, found.Time.UnixNano()),
	})
	return classify(l.stored(ctx, sent, err), func() bool { return l.Ready(ctx) == nil })
}

// delete deletes a dead letter. It asks again if it got no answer: the letter may be deleted.
func (l *letters) delete(ctx context.Context, stream jetstream.Stream, seq uint64) error {
	for again := false; ; again = true {
		err := l.call(ctx, "delete dead letter", func(ctx context.Context) error { return stream.DeleteMsg(ctx, seq) })
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful):
			if again || ctx.Err() != nil {
				return fmt.Errorf("%w: %w", driver.ErrUnavailable, err)
			}
		case strings.Contains(err.Error(), "err_code=10043"), strings.Contains(err.Error(), "no message found"):
			if again {
				return nil
			}
			return driver.ErrGone
		default:
			return err
		}
	}
}

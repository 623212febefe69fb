package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Replay implements inbox.DeadLetters. Each letter leaves its queue once the broker has confirmed
// it in the other. The error names the first that could not be returned, and counts those too old
// for it.
func (l *deadLetters) Replay(ctx context.Context, filter inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	if err := driver.CheckReplay(how); err != nil {
		return inbox.Replayed{}, wrap("replay", err)
	}
	publisher := amqpconn.NewPublisher(amqpconn.PublisherConfig{Dial: l.dial, Timeout: l.timeout, Logger: l.logger})
	publishing, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	if !how.DryRun {
		running.Go(func() { publisher.Run(publishing) })
	}
	defer running.Wait()
	defer cancel()

	r := replay{how: how, retention: l.retention, publisher: publisher}
	_, err := l.each(ctx, filter, func(raw amqp.Delivery, dead inbox.DeadLetter) (fate, error) { return r.visit(ctx, raw, dead) })
	if r.done.Outlived > 0 {
		r.refused = errors.Join(r.refused, fmt.Errorf("%d messages: %w", r.done.Outlived, inbox.ErrOutlived))
	}
	err = errors.Join(err, r.refused)
	if !how.DryRun {
		l.audit(ctx, "dead letters returned", how.By, how.Reason, filter, err,
			slog.Int("returned", r.done.Returned), slog.Int("outlived", r.done.Outlived), slog.Int("failed", r.done.Failed))
	}
	return r.done, wrap("replay", err)
}

// replay is one call of Replay.
type replay struct {
	how       inbox.Replay
	retention time.Duration
	publisher *amqpconn.Publisher
	done      inbox.Replayed
	refused   error // the first reason why a message stays
}

func (r *replay) visit(ctx context.Context, raw amqp.Delivery, dead inbox.DeadLetter) (fate, error) {
	switch {
	case driver.Outlived(r.how, dead, r.retention, time.Now()):
		r.done.Outlived++
		return passOver, nil
	case dead.Message.Queue == "":
		return r.failed(fmt.Errorf("message %s does not name the queue it came from", dead.Message.ID))
	case r.how.DryRun:
		r.done.Returned++
		return keep, nil
	}
	if pause := driver.Pause(r.how); pause > 0 && r.done.Returned > 0 {
		if err := runloop.Sleep(ctx, pause); err != nil {
			return passOver, err
		}
	}
	err := r.publish(ctx, raw, dead)
	if errors.Is(err, amqpconn.ErrUnavailable) || errors.Is(err, amqpconn.ErrBlocked) {
		return passOver, err // it would be the same for all
	}
	if err != nil {
		return r.failed(err)
	}
	r.done.Returned++
	return remove, nil
}

func (r *replay) failed(why error) (fate, error) {
	r.done.Failed++
	r.refused = cmp.Or(r.refused, why)
	return passOver, nil
}

func (r *replay) publish(ctx context.Context, raw amqp.Delivery, dead inbox.DeadLetter) error {
	err := r.publisher.Confirmed(ctx, amqpconn.Out{Key: dead.Message.Queue, Message: replayCopy(raw)})
	if err != nil {
		return fmt.Errorf("message %s to queue %q: %w", dead.Message.ID, dead.Message.Queue, err)
	}
	return nil
}

package amqpconn

import (
	"context"
	"time"
)

// blockedInterval is how often those who wait for a place look whether the broker has
// blocked the connection: it then frees none, for as long as its alarm lasts.
const blockedInterval = 250 * time.Millisecond

// admit places a message in the window once there is room. The error is errEnded if the window has
// ended.
func (w *window) admit(e *entry) error {
	if err := w.reserve(e); err != nil {
		return err
	}
	e.since = time.Now()
	if !w.enqueue(e) {
		w.release(e.places)
		return errEnded
	}
	return nil
}

// reserve waits for a free place, for all of them if the message is a suspect, unless the broker has
// blocked the connection.
func (w *window) reserve(e *entry) error {
	if !e.suspect && !w.suspects.has(e.out) {
		e.places = 1
		return w.place(e.ctx)
	}
	select {
	case w.suspects.turn <- struct{}{}:
		defer func() { <-w.suspects.turn }()
	case <-w.dead:
		return errEnded
	case <-e.ctx.Done():
		return unavailable(e.ctx.Err())
	}
	for e.places = 0; e.places < cap(w.slots); e.places++ {
		if err := w.place(e.ctx); err != nil {
			w.release(e.places)
			return err
		}
	}
	return nil
}

func (w *window) release(places int) {
	for range places {
		<-w.slots
	}
}

func (w *window) place(ctx context.Context) error {
	if reason, isBlocked := w.conn.Blocked(); isBlocked {
		return blocked(reason)
	}
	select {
	case w.slots <- struct{}{}:
		return nil
	default:
	}
	look := time.NewTicker(blockedInterval) // a block may begin while this waits
	defer look.Stop()
	for {
		select {
		case w.slots <- struct{}{}:
			return nil
		case <-w.dead:
			return errEnded
		case <-ctx.Done():
			return unavailable(ctx.Err())
		case <-look.C:
			if reason, isBlocked := w.conn.Blocked(); isBlocked {
				return blocked(reason)
			}
		}
	}
}

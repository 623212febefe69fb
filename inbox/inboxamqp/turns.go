package inboxamqp

import (
	"sync"
	"time"
)

// turns lets messages run side by side, but for one that is suspected of ending the process:
// that one runs alone, so that if it does so no other message is suspected. It does so for a
// time only: a handler that hangs must not stop the consumer.
type turns struct {
	door   chan struct{} // one place: who begins passes through it
	places chan struct{} // one for each worker
}

func newTurns(workers int) *turns {
	return &turns{door: make(chan struct{}, 1), places: make(chan struct{}, workers)}
}

// share waits while a message runs alone, or is about to.
func (t *turns) share() (release func()) {
	t.door <- struct{}{}
	t.places <- struct{}{}
	<-t.door
	return func() { <-t.places }
}

// alone keeps others from beginning and waits until those that run have ended, though no
// longer than patience. As long after that others may begin again.
func (t *turns) alone(patience time.Duration) (release func()) {
	t.door <- struct{}{}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	held := 0
	for waiting := true; waiting && held < cap(t.places); {
		select {
		case t.places <- struct{}{}:
			held++
		case <-timer.C:
			waiting = false
		}
	}
	open := sync.OnceFunc(func() {
		for range held {
			<-t.places
		}
		<-t.door
	})
	after := time.AfterFunc(patience, open)
	return func() {
		after.Stop()
		open()
	}
}

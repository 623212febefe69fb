package inboxamqp

import "time"

// turns lets messages run side by side, but for one that is suspected of ending the process:
// that one runs alone, so that if it does so no other message is suspected.
type turns struct {
	places chan struct{} // one for each worker
	solo   chan struct{} // one place
}

func newTurns(workers int) *turns {
	return &turns{places: make(chan struct{}, workers), solo: make(chan struct{}, 1)}
}

// share waits while a message runs alone.
func (t *turns) share() (release func()) {
	t.places <- struct{}{}
	return func() { <-t.places }
}

// alone waits until no other message runs, though no longer than patience: a handler that
// hangs must not stop the consumer.
func (t *turns) alone(patience time.Duration) (release func()) {
	t.solo <- struct{}{}
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
	return func() {
		for range held {
			<-t.places
		}
		<-t.solo
	}
}

package outbox

import (
	"fmt"
	"sync"
	"time"
)

// breaker is the circuit breaker before a publisher. A pause leaves the publisher alone for a while.
// After its end one batch tries the publisher, and the others leave it alone until that batch has
// ended. A reconnect ends a pause early.
//
// Its methods may be called from any goroutine.
type breaker struct {
	delay func(failures int) time.Duration // the length of a pause

	mu    sync.Mutex
	pause *pause    // nil: messages flow
	ready time.Time // when the publisher was last ready again
}

// pause is what is known of a publisher that failed.
type pause struct {
	failures int // in a row
	since    time.Time
	until    time.Time
	trying   bool
	err      error
}

// outage is why a publisher failed a batch, and when.
type outage struct {
	err error
	at  time.Time
}

// leftAlone reports whether a batch that begins now must not use the transport.
func (b *breaker) leftAlone() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pause != nil && (b.pause.trying || time.Now().Before(b.pause.until))
}

// resumesIn returns the time until the pause ends; 0: there is none, or it has ended.
func (b *breaker) resumesIn() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return 0
	}
	return max(0, time.Until(b.pause.until))
}

// try notes that a batch that began at begin has messages of the transport.
func (b *breaker) try(begin time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil && !b.pause.since.After(begin) {
		b.pause.trying = true
	}
}

// fail pauses the transport after it failed a batch that began at begin. What began before the pause
// that it has says nothing new, and a failure from before the publisher's reconnect asks for none.
func (b *breaker) fail(down outage, begin time.Time) (failures int, length time.Duration, paused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil {
		if b.pause.since.After(begin) {
			return 0, 0, false
		}
		failures = b.pause.failures
	}
	failures++
	length = b.delay(failures)
	if b.ready.After(down.at) {
		length = 0
	}
	now := time.Now()
	b.pause = &pause{failures: failures, since: now, until: now.Add(length), err: down.err}
	return failures, length, true
}

// end is called when a batch that began at begin has ended. Where the transport answered, its pause
// is over, and failures says how many there were.
func (b *breaker) end(begin time.Time, answered bool) (failures int, resumed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil || b.pause.since.After(begin) {
		return 0, false
	}
	if !answered {
		b.pause.trying = false
		return 0, false
	}
	failures = b.pause.failures
	b.pause = nil
	return failures, true
}

// forget drops a pause that is over. It is called when no message is left to try the transport with.
func (b *breaker) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil && !b.pause.trying && !time.Now().Before(b.pause.until) {
		b.pause = nil
	}
}

// reconnected ends the pause, and explains the failures until now.
func (b *breaker) reconnected() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ready = time.Now()
	if b.pause != nil && b.ready.Before(b.pause.until) {
		b.pause.until = b.ready
	}
}

// state is the breaker's part of a transport's stats.
func (b *breaker) state() TransportStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return TransportStats{State: stateClosed}
	}
	s := TransportStats{State: stateProbing, Failures: b.pause.failures, Err: b.pause.err}
	if time.Now().Before(b.pause.until) {
		s.State = statePaused
	}
	return s
}

// paused is an error while there is a pause.
func (b *breaker) paused() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return nil
	}
	return fmt.Errorf("paused after %d failures: %w", b.pause.failures, b.pause.err)
}

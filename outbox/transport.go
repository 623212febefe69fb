package outbox

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// transport is one publisher and the circuit breaker before it. A pause leaves the publisher alone
// for a while. After its end one batch tries the publisher, and the others leave it alone until that
// batch has ended. A reconnect ends a pause early.
//
// Its methods may be called from any goroutine.
type transport struct {
	name      string
	publisher driver.Publisher
	delay     func(failures int) time.Duration // the length of a pause

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
func (t *transport) leftAlone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pause != nil && (t.pause.trying || time.Now().Before(t.pause.until))
}

// resumesIn returns the time until the pause ends; 0: there is none, or it has ended.
func (t *transport) resumesIn() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause == nil {
		return 0
	}
	return max(0, time.Until(t.pause.until))
}

// try notes that a batch that began at begin has messages of the transport.
func (t *transport) try(begin time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause != nil && !t.pause.since.After(begin) {
		t.pause.trying = true
	}
}

// fail pauses the transport after it failed a batch that began at begin. What began before the pause
// that it has says nothing new, and a failure from before the publisher's reconnect asks for none.
func (t *transport) fail(down outage, begin time.Time) (failures int, length time.Duration, paused bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause != nil {
		if t.pause.since.After(begin) {
			return 0, 0, false
		}
		failures = t.pause.failures
	}
	failures++
	length = t.delay(failures)
	if t.ready.After(down.at) {
		length = 0
	}
	now := time.Now()
	t.pause = &pause{failures: failures, since: now, until: now.Add(length), err: down.err}
	return failures, length, true
}

// end is called when a batch that began at begin has ended. Where the transport answered, its pause
// is over, and failures says how many there were.
func (t *transport) end(begin time.Time, answered bool) (failures int, resumed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause == nil || t.pause.since.After(begin) {
		return 0, false
	}
	if !answered {
		t.pause.trying = false
		return 0, false
	}
	failures = t.pause.failures
	t.pause = nil
	return failures, true
}

// forget drops a pause that is over. It is called when no message is left to try the transport with.
func (t *transport) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause != nil && !t.pause.trying && !time.Now().Before(t.pause.until) {
		t.pause = nil
	}
}

// reconnected ends the pause, and explains the failures until now.
func (t *transport) reconnected() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready = time.Now()
	if t.pause != nil && t.ready.Before(t.pause.until) {
		t.pause.until = t.ready
	}
}

// stats is the state of the breaker, and how full the publisher's window is.
func (t *transport) stats() TransportStats {
	s := TransportStats{State: stateClosed}
	if w, ok := t.publisher.(driver.Windowed); ok {
		if used, size := w.Window(); size > 0 {
			s.Window = float64(used) / float64(size)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause == nil {
		return s
	}
	s.State, s.Failures, s.Err = stateProbing, t.pause.failures, t.pause.err
	if time.Now().Before(t.pause.until) {
		s.State = statePaused
	}
	return s
}

// paused is an error while the transport is paused.
func (t *transport) paused() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pause == nil {
		return nil
	}
	return fmt.Errorf("outbox: transport %q is paused after %d failures: %w", t.name, t.pause.failures, t.pause.err)
}

// pauses reports whether a failure says something about the transport rather than the message.
func pauses(c driver.Class) bool { return c == driver.Unavailable || c == driver.Blocked }

// transports are by name. The name "" is the default one.
type transports map[string]*transport

// leftAlone returns the names of those that a batch that begins now must not use.
func (ts transports) leftAlone() []string {
	var names []string
	for name, t := range ts {
		if t.leftAlone() {
			names = append(names, name)
		}
	}
	return names
}

// nextResume returns the time until the next pause ends; 0: no transport is paused.
func (ts transports) nextResume() time.Duration {
	var next time.Duration
	for _, t := range ts {
		if d := t.resumesIn(); d > 0 && (next == 0 || d < next) {
			next = d
		}
	}
	return next
}

// allPaused returns for how long there is nothing to do because every transport is paused.
func (ts transports) allPaused() time.Duration {
	if len(ts.leftAlone()) < len(ts) {
		return 0
	}
	return ts.nextResume()
}

// try notes which transports have messages in a batch that began at begin.
func (ts transports) try(messages []driver.Message, begin time.Time) {
	tried := map[string]bool{}
	for _, m := range messages {
		if t, ok := ts[m.Transport]; ok && !tried[m.Transport] {
			tried[m.Transport] = true
			t.try(begin)
		}
	}
}

// paused joins an error for each transport that is paused.
func (ts transports) paused() error {
	var errs []error
	for _, t := range ts {
		errs = append(errs, t.paused())
	}
	return errors.Join(errs...)
}

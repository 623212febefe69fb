package idempotencypgx

import "sync/atomic"

// expectation is that the next request is what the last one was: a replay or not. Replays come
// in rows, when clients repeat what was cut off. It chooses which statement is tried first, and
// decides nothing. It is safe for concurrent use.
type expectation struct{ replay atomic.Bool }

func (e *expectation) isReplay() bool { return e.replay.Load() }

// set writes only what is new: all requests read it.
func (e *expectation) set(replay bool) {
	if e.replay.Load() != replay {
		e.replay.Store(replay)
	}
}

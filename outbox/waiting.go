package outbox

import "time"

// Waiting is a message that an outbox holds and that is not published. Stores have a method Waiting
// that lists them.
type Waiting struct {
	Message
	// CreatedAt is when it was stored, and DueAt when its attempt is due, both by the store's clock. A
	// zero DueAt: it is ready, or follows the one before it in its key.
	CreatedAt, DueAt time.Time
	// Attempts counts those that failed; Class and Error say what the last one met.
	Attempts     int
	Class, Error string
	// Unreadable is as in DeadLetter.
	Unreadable error
	// Cursor is where the message is in the list of those that are parked, or of the others: as
	// WaitingFilter.After of the same list it has that begin behind it, also when the message is gone.
	// Only the store can read it.
	Cursor string
}

// WaitingFilter selects messages of an outbox: those that match every field that is set.
type WaitingFilter struct {
	// Parked selects those that wait for their first or their next attempt, by the time when they are
	// due. Otherwise those are selected that are ready, and those that follow a parked one of their key, as
	// they were stored.
	Parked bool
	// Name and Key select what equals them. Optional.
	Name, Key string
	// Limit is the most messages. Default: 100.
	Limit int
	// After is the Cursor of a message: the list begins behind it. Optional. A message that is committed, or
	// parked, while one pages may lie before the place that is reached: a list that begins again shows it.
	After string
}

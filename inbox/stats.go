package inbox

// Stats counts the messages of a consumer, those of all its processes together.
type Stats struct {
	// Waiting messages are in the queue or stream, and no consumer has them. Where Redis cannot tell
	// what a group has not read, which is so after XDEL, all entries of the stream count.
	Waiting int
	// Retrying messages wait for their next attempt at a place of their own.
	Retrying int
	// Dead counts the dead letters by class, also of other consumers that have the same places for them.
	Dead map[string]int
	// Held says that a session may have further dead letters in hand, which Dead leaves out, such as a
	// replay that is paced. Of RabbitMQ only; see ErrHeld.
	Held bool
}

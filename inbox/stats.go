package inbox

// Stats counts the messages of a consumer, those of all its processes together.
type Stats struct {
	// Waiting messages are in the queue or stream, and no consumer has them. Where Redis cannot tell
	// what a group has not read, which is so after XDEL, all entries of the stream count.
	Waiting int
	// Retrying messages have failed and wait for their next attempt at a place of their own. On RabbitMQ a process
	// that dies may leave up to Config.Prefetch too many, for an hour.
	Retrying int
	// PutOff messages wait at a place of their own and have not failed: a limit or a Postpone has sent them there.
	// They are counted as Retrying is.
	PutOff int
	// Dead counts the dead letters by the class of their queue, also of other consumers that share it. Those of a
	// class without a queue of its own, see ConsumerConfig.Classes, are counted as default.
	Dead map[string]int
	// Held says that a session may have further dead letters in hand, which Dead leaves out, such as a
	// replay that is paced. Of RabbitMQ only; see ErrHeld.
	Held bool
}

package operator

// Access is what somebody may do on the page, or an agent.
type Access struct {
	// By is who it is, as the log keeps it: at most 128 bytes without control characters. Required where
	// Change is set.
	By string
	// Bodies allows to look at the bodies and the headers of messages.
	Bodies bool
	// Change allows to retry and drop dead letters, to pause and resume, and to reset limits; with Bodies also to
	// edit.
	Change bool
}

// MaskedMessage is a message whose body is about to be shown.
type MaskedMessage struct {
	From        string // the outbox or the consumer
	Name        string
	ContentType string
	Body        []byte
}

package outboxamqp

// NewPublisherWithWindow is NewPublisher with another window.
var NewPublisherWithWindow = newPublisher

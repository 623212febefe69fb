package inboxtest

import "github.com/holdfast-go/holdfast/inbox/internal/memqueue"

// NewConsumerOf is NewConsumer with a limit for the body, unless it is 0.
var NewConsumerOf = newConsumer

// Queue returns the queue with a name, for a transport.
func (b *Broker) Queue(name string, classes ...string) *memqueue.Queue {
	return b.queues.Queue(name, classes...)
}

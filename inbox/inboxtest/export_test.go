package inboxtest

import "github.com/holdfast-go/holdfast/inbox/internal/memqueue"

// NewConsumerOf is NewConsumer with the largest body that is processed, unless that is 0.
var NewConsumerOf = newConsumer

// Queue returns the queue of a name as a transport sees it.
func (b *Broker) Queue(name string, classes ...string) *memqueue.Queue {
	return b.queues.Queue(name, classes...)
}

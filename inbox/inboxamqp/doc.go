// Package inboxamqp consumes messages from RabbitMQ and settles each by the result of an inbox.Processor.
//
//	dial := inboxamqp.Dial(url, amqp.Config{})
//	queue := inboxamqp.Queue{Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}}
//	consumer, err := inboxamqp.NewConsumer(dial, queue, billing, inbox.ConsumerConfig{})
//	err = consumer.Setup(ctx) // only where this process owns the topology
//	err = consumer.Run(ctx)
//
// The comments at the top of topology.go (queues, permissions, retries), partitions.go, deadletters.go, session.go
// (faults), consumer.go (the ledger) and convert.go (names, limits) describe the details.
//
// # Settling
//
// A message is acknowledged after the processor returned nil for it, or after a copy of it was confirmed in a
// delay queue or dead-letter queue. Copies are mandatory, persistent and confirmed, and use a connection of their
// own. While that connection is down, or the broker blocks publishers, failed messages wait, up to 1000 messages
// and 64 MiB, and other messages are processed. If the queue for a failed message is missing, full or closed to
// the consumer, the message goes behind the others, and no attempt is counted. It goes through a delay queue, or
// else to the end of its own queue, and is delivered again after 1 to 5 seconds. The consumer moves about 20 such
// messages a second. Ready names the queue meanwhile.
//
// Acknowledgements of consecutive messages are combined into one. An acknowledgement of a message that finishes
// before an earlier one waits for it, up to 200 ms and a quarter of the prefetch, because a separate
// acknowledgement costs the broker as much as the delivery. It does not wait while the handlers are nearly idle.
// On shutdown the consumer writes waiting acknowledgements first. After a crash or a lost connection, their
// messages are redelivered together with those in flight.
//
// Each session has its own connection, and each delivery refers to its session. So a message that was delivered
// before a fault is never settled after it: the broker delivers it again. A crash between the effect of a handler
// and its acknowledgement, or between the confirm of a copy and the acknowledgement of the original, leaves two
// copies. Processors with deduplication (inboxpgx, inboxredis) discard the second one.
//
// With ConsumerConfig.Ordered the messages of one key are processed in the order in which the queue delivers them,
// one at a time, retries included. A failed message keeps its place in this process, and only its key waits. The
// key is the header holdfast-key, which outboxamqp sends for messages with a key. ConsumerConfig.Key can read it
// from elsewhere, but not for partitions.
//
// Setup then declares the queue with a single active consumer (x-single-active-consumer, an argument that cannot
// be added to an existing queue). The broker serves one process, and the others wait. When that process ends,
// crashes or loses its connection, the next one receives the unsettled messages first, in order. An ordered
// consumer therefore never cancels itself and does not requeue single messages: it closes its channel. Every
// process needs the same ConsumerConfig.Prefetch. If a quorum queue requeues more messages than the next process
// may prefetch, and that process ends too, their order is lost. Check reports a queue that was declared without a
// single active consumer.
//
// Within one process, no message starts before the previous message of its key is done. Two processes may overlap,
// because one was frozen or cut off and still works on its messages. Then the deduplication in the handler's
// transaction (inboxpgx) keeps the effects in order: the new process runs the same messages, in order, and each
// takes effect once. Without deduplication, handlers may see the last few messages again, in order, when a process
// is lost. If a process is lost while it stores a dead letter, the next process may run the same message again.
//
// One process does all the work of such a queue. With Queue.Partitions several processes share it.
//
// With ConsumerConfig.Batch the processor gets several messages in one call: those that arrived while all workers
// were busy. The consumer never waits to fill a batch. Each message is still settled by its own result. A message
// that has failed before, or that the ledger watches, runs alone.
//
// # Shutdown
//
// When its context is cancelled or a limit is reached, Run cancels its consumer, requeues messages that have not
// started, and waits for running handlers. After nine tenths of ConsumerConfig.ShutdownTimeout it cancels their
// context with the cause inbox.ErrDraining; messages that fail after that are requeued. The shutdown neither
// counts an attempt nor creates a dead letter. Run returns within ShutdownTimeout, and abandons handlers that
// ignore cancellation.
package inboxamqp

// Package inboxamqp consumes messages from RabbitMQ and settles each by the
// answer of an inbox.Processor.
//
//	dial := inboxamqp.Dial(url, amqp.Config{})
//	queue := inboxamqp.Queue{Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}}
//	consumer, err := inboxamqp.NewConsumer(dial, queue, billing, inbox.ConsumerConfig{})
//	err = consumer.Setup(ctx) // only where this process owns the topology
//	err = consumer.Run(ctx)
//
// The heads of topology.go (queues, permissions, retries), partitions.go, deadletters.go, session.go (faults),
// consumer.go (the ledger) and convert.go (names, limits) describe the details.
//
// # Settling
//
// A message is acknowledged after the processor returned nil for it, or after a
// copy of it is confirmed elsewhere: in a delay queue, or in a dead-letter queue.
// Copies are mandatory, persistent and confirmed, over a connection
// of their own. While that connection is down, or the broker blocks publishers, failed
// messages wait, up to 1000 of them and 64 MiB, and the others are processed. A failed message
// whose queue is missing, full or closed to the consumer goes behind the others, uncounted: through
// a delay queue, or else to the end of its own queue. It comes again after 1 to 5 seconds; about 20
// such messages a second do. Ready names the queue meanwhile.
//
// Acknowledgements of messages that follow one another are written as one. Those of messages that are done
// before an earlier one wait for it, up to 200 ms and a quarter of the prefetch: one for each costs
// the broker as much as handing the message out. They do not wait while the handlers have little to do next.
// A consumer that ends writes them before. After a crash, or when the connection is lost, their messages
// come again with those in work.
//
// A connection lives for one session and every delivery knows its session, so a
// message that was delivered before a fault is never settled after it: the broker
// delivers it again. Between the effect of a handler and its acknowledgement, and
// between the confirm of a copy and the acknowledgement of the original, a crash
// leaves two of them. Processors with deduplication (inboxpgx, inboxredis) absorb that.
//
// # Order
//
// With ConsumerConfig.Ordered the messages of one key are processed in the order in which the queue delivers
// them, one at a time, retries included: a failed message keeps its place in this process, and only
// its key waits. The key is the header holdfast-key, which outboxamqp sends of messages with one;
// ConsumerConfig.Key reads it from elsewhere, but not for partitions.
//
// Setup then declares the queue with a single active consumer (x-single-active-consumer, an argument
// that an existing queue cannot be given): the broker serves one process, and the others stand by. When
// that one ends, dies or loses its connection, the next gets what is unsettled first, in its order. An
// ordered consumer therefore never cancels itself and gives nothing back by itself: it closes its
// channel. Every process needs the same ConsumerConfig.Prefetch, since a quorum queue that takes back more than
// the next one may hold loses the order when that one ends as well. Check names a queue that was not
// declared so.
//
// What this promises: no message begins before the one before it of its key is done in the same
// process. While two processes overlap, because one was frozen or cut off and works on what it has, it
// is the deduplication in the handler's transaction (inboxpgx) that keeps the effects in order: the new
// one runs the same messages, in order, and each takes effect once. Handlers without it see an order
// that may begin again a few messages back when a process is lost. A dead letter that a process stores
// just as it is lost may be followed by the same message, processed by the next.
//
// One process does all the work of such a queue. Queue.Partitions has several of them share it.
//
// # Batches
//
// With ConsumerConfig.Batch the processor gets several messages in one call: those that have
// gathered while all workers were busy. Nothing waits for a batch to fill. Each message is
// still settled by its own result. One that has failed before, or that the ledger watches,
// comes alone.
//
// # The end
//
// When its context is cancelled or a limit is reached, Run cancels its consumer,
// gives back the messages that are not begun, and lets the others finish. After nine
// tenths of ConsumerConfig.ShutdownTimeout it cancels their context with the cause
// inbox.ErrDraining; what fails after that is given back. No message is counted or
// becomes a dead letter because of the end. Run returns within ShutdownTimeout, and leaves
// behind what ignores that its time is over.
package inboxamqp

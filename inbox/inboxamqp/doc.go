// Package inboxamqp consumes messages from RabbitMQ and settles each by the
// answer of an inbox.Processor.
//
//	dial := inboxamqp.Dial(url, amqp.Config{})
//	consumer, err := inboxamqp.NewConsumer(dial, "billing", processor, inboxamqp.Config{
//		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
//	})
//	err = consumer.Setup(ctx) // only where this process owns the topology
//	err = consumer.Run(ctx)
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
// # Queues
//
// Setup declares four queues for a consumer of "billing", and one more for each of Config.Classes. With
// Config.Partitions it declares one for each partition in place of the first, and billing.members:
//
//	billing                 its messages
//	billing.failed.default  its dead letters, of all classes that are not in Config.Classes
//	billing.retrying        one empty message for each message that waits for its next attempt
//	billing.putoff          one empty message for each message that waits and has not failed
//
// All consumers of a virtual host share 20 delay queues, holdfast.delay.100 to holdfast.delay.960000, the queue
// holdfast.lost, and the exchanges holdfast.delay, holdfast.return and holdfast.lost. A message that is to wait
// goes to the exchange holdfast.delay with the name of its queue as routing key and its delay in milliseconds in
// the header holdfast-delay, which selects the delay queue. When its time is up, it returns by holdfast.return.
// If its queue is gone, it goes to holdfast.lost, so that it blocks nobody. Watch that queue; Check reports its
// messages. Move them to the exchange holdfast.return by a shovel when their queue is there again.
//
// A consumer's queue must not refuse messages: declare none with x-overflow reject-publish, and set no such policy.
// A delay queue keeps the messages that their queue refuses, and some dozens of those block the retries
// of all consumers of the virtual host. Check names a queue that was declared so; it cannot see policies. A queue
// that is unavailable, such as a classic queue on a node that is down, has the same effect.
//
// Run binds its queue to holdfast.return at each session, for a queue that was deleted and declared again without
// Setup. Where it may not, it logs that, and Setup must be called.
//
// The queues are quorum queues; with Config.Classic those of the consumer are classic. Delay queues dead-letter
// at least once. Every quorum queue has x-delivery-limit 1,000,000,000, on all versions of RabbitMQ: without one
// RabbitMQ 4 drops messages that were given back 20 times, dead letters too, as each look at them gives them back.
// A queue that was declared without it, by an older version of this package for example, needs a policy with the
// same delivery-limit before its broker is upgraded to RabbitMQ 4. Check names such queues.
//
// Whoever calls Setup needs the permissions to configure, write and read holdfast\..* and the consumer's own
// names, and to read the exchanges of Config.Bindings. Without them Setup succeeds where everything exists and
// Config.Bindings is empty. Run needs to read the consumer's queues and to write to amq.default and holdfast.delay.
// To bind its queue it needs to write to the queue and to read holdfast.return.
//
// # Retries
//
// A delay queue waits for 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 or 64 seconds, or for 2, 4, 8
// or 16 minutes. A message takes the shortest one that is long enough, so it is never early and up to half of its
// delay and 1.5 seconds late. Where that would be later, and for longer delays, it passes through several, and
// through its own queue in between. The count of attempts travels in the header holdfast-attempt. Later messages
// overtake a failed one. When the broker ends while it returns a message from a delay queue, it tries again after
// three minutes: that retry is late. The broker's setting dead_letter_worker_publisher_confirm_timeout
// (advanced.config, application rabbit, in milliseconds) shortens that.
//
// # Order
//
// With Config.Ordered the messages of one key are processed in the order in which the queue delivers
// them, one at a time, retries included: a failed message keeps its place in this process, and only
// its key waits. The key is the header holdfast-key, which outboxamqp sends of messages with one;
// Config.Key reads it from elsewhere, but not for partitions.
//
// Setup then declares the queue with a single active consumer (x-single-active-consumer, an argument
// that an existing queue cannot be given): the broker serves one process, and the others stand by. When
// that one ends, dies or loses its connection, the next gets what is unsettled first, in its order. An
// ordered consumer therefore never cancels itself and gives nothing back by itself: it closes its
// channel. Every process needs the same Config.Prefetch, since a quorum queue that takes back more than
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
// One process does all the work of such a queue. Config.Partitions has several of them share it.
//
// # Partitions
//
// With Config.Partitions of 4 the consumer of "orders" reads the queues "orders.0" to "orders.3", each
// with a single active consumer. The sender says which key is in which: outboxamqp adds a second routing
// key to messages with an ordering key, holdfast.slot.<n> in the header CC, where n is the CRC-32 of the
// key modulo 64. Setup makes "orders" a direct exchange, binds it to the exchanges of Config.Bindings, and
// binds to it each slot's partition, which is n modulo the number of partitions. So all messages of a key
// are in one partition, also when brokers restart, and senders need not know the number. While a partition
// is missing its keys have no route. Messages without a slot, which have no key or are of other senders,
// are all in the first partition: they come there by the exchange "orders.slotless.4". A sender of another
// kind adds the header by itself. Whoever publishes to the queue "orders" by the default exchange must
// publish to the exchange "orders" instead.
//
// Run runs one consumer for each partition, side by side. Concurrency, Batch, Prefetch and the limits of
// single handlers are those of each partition: a process that serves 4 of them with a Concurrency of 8
// runs up to 32 handlers. TimeLimit, MessageLimit and MemoryLimit end the whole Run, and MessageLimit counts
// the messages of all partitions. A message that may have ended the process runs alone in it. Each partition pauses by itself
// while a server is down. While a partition is missing, Ready and the log name it, and the others are served. Run
// needs a connection for each partition, one for copies, and one that counts the processes.
//
// The Queue of a message, the attribute queue in logs and metrics and the origin of a dead letter name the
// partition. The metric dead_letters names the queue "orders": the dead letters of all partitions are in the same
// queues. Replay gives a dead letter to the exchange, and so to the partition of its slot.
//
// The broker serves each partition to the process that subscribed first. About every 10 seconds a process
// compares its partitions with its share: their number divided by the number of processes, rounded up. It gives up
// those above the share. It receives no more messages of the partition, waits for the handlers that run, as at the end
// of Run, closes the session and subscribes again behind the other processes. No message is processed twice for it,
// unless a handler ignores its end for longer than ShutdownTimeout. The next process tries a message that waits for a
// retry at once; without a ledger its attempts begin anew. A partition counts once it has delivered a message. The processes
// are counted by the queue "orders.members", which each consumes and which stays empty. When a process
// ends or dies, its partitions go to the others at once.
//
// Another number of partitions sends keys elsewhere, and later messages of a key may overtake those that
// are queued. So stop the publishers, a relay for example, until the partitions are empty, and delete the
// exchange and the old queues: Setup refuses and Check names what is left, and Run and Ready say so of a
// process with another number. The guide examples/guides/production.md has the steps. No other queue may be
// bound to the exchange. Replay needs the permission to write to it.
//
// # Batches
//
// With Config.Batch the processor gets several messages in one call: those that have
// gathered while all workers were busy. Nothing waits for a batch to fill. Each message is
// still settled by its own result. One that has failed before, or that the ledger watches,
// comes alone.
//
// # The ledger
//
// With a processor that keeps a ledger (*inboxpgx.Store) the attempts are noted in a database as
// well, from the second on, so that a message that goes well at once pays nothing. An attempt is
// noted as over when its retry is confirmed and before the original is acknowledged: when the
// process dies in between, the original is known as a leftover and dropped, where it would run
// again and schedule a retry of its own. When the retry is overdue by 5 minutes, as after a purge of its
// queue, the original runs in its place. The beginning and the end of each run are noted, too.
// When a run began and the process did not survive it, the message runs alone from then on, for
// half a minute each time, so that no other message is blamed, and after Config.MaxCrashes such
// runs its next redelivery goes unrun to the class quarantined. That holds for a good message,
// too, if something else ends the process in so many of its runs, one after the other.
//
// # Dead letters
//
// They lie in <prefix>failed.<class>, for the classes default and those of Config.Classes, and the others in
// that of default. The prefix is the name of the consumer's queue and a dot, unless Config.DeadLetterPrefix is set.
// A dead letter has its envelope and headers, and in
// headers of ours the class, the error with its Go type and SQLSTATE, the fingerprint, the attempts
// and their history, the times of the first and the last failure, the consumer, and the queue, exchange
// and routing key they came from. Left out of every copy are the broker's own headers, BCC, what is not
// the slot in CC, the expiration and the user id. Of more than 64 KiB of headers only ours and those that
// name the message are kept. Consumer.DeadLetters lists, counts, returns and removes them.
//
// RabbitMQ hands out each letter once, and does not tell how many it has handed out. A look waits up to a
// second while a queue of dead letters has another consumer. If that stays, a paced Replay for example, or if
// the queue gives less than it has counted, the look is of a part, and its error is inbox.ErrHeld. What a
// session has not settled that is no consumer, because it took it with basic.get or has cancelled since, is
// missed without a word. So are the letters of a quorum queue without a leader, as when the majority of its
// nodes is down: RabbitMQ says that it is empty. After a look a quorum queue may take a moment to count its
// letters again. A look waits for that, a second or a little more; the next one may miss letters of a queue
// that takes longer.
//
// # Faults
//
// The consumer asks the broker every two seconds whether it is there, and connects anew when it
// has not answered for five, or for one and a half heartbeats if that is less. The broker, too, must
// notice a connection that fell silent before it delivers again what that was given: after two to
// three heartbeats. They are in the amqp.Config of the dial function, 10 s by default.
//
// On a lost connection, a closed channel, a deleted queue or a restarted broker the consumer
// begins a new session, after pauses that grow to 2 seconds. The log and Ready name a queue that
// does not exist: Run declares nothing, and goes on as soon as Setup has declared it again. RabbitMQ
// 3.10 confirms the declaration of a quorum queue before it is on the disk. Killed right then, it
// comes back with a queue that takes no messages; delete it and call Setup.
//
// An error of inbox.Unavailable, for a database that is down, keeps the message. When another one
// that began later goes through, the server is there: the message goes behind the others for about
// two seconds, and the second time has failed by itself, so that its failure is counted as any
// other. When 16 messages have failed, or as many as Prefetch, or one has waited for 5 seconds for
// another that runs, the consumer pauses: it cancels itself at the broker and tries a few messages
// at a time, at distances up to about 2 seconds, until one goes through. It tries messages that
// have not failed yet first, and more where those run for over 2 seconds. Where no other begins for
// 1.5 seconds, those that failed are tried again, and it pauses when they fail.
//
// # The end
//
// When its context is cancelled or a limit is reached, Run cancels its consumer,
// gives back the messages that are not begun, and lets the others finish. After nine
// tenths of Config.ShutdownTimeout it cancels their context with the cause
// inbox.ErrDraining; what fails after that is given back. No message is counted or
// becomes a dead letter because of the end. Run returns within ShutdownTimeout, and leaves
// behind what ignores that its time is over.
//
// # Names and limits
//
// The name of a message is the property type, else that of a stamp MessageNameStamp of Symfony
// Messenger, else the header type, and Config.Format has names for PHP's classes; its id is the property
// message_id, else that of a stamp MessageIdStamp. Without content_type the body is JSON, and without timestamp the message
// was written at the time in its id. CloudEvents are read as package outbox/format says. A body of more than 16 MiB is a dead letter of class validation. Dead letters that
// were moved back by other means than Replay, a shovel for example, begin anew. Queues are
// declared by Setup and by nothing else, and those that exist are used as they are. A consumer_timeout of the broker below its default of 30 minutes is too short for
// large batches: the consumer counts on the default.
//
// RabbitMQ 3.10 may not tell the consumers of a quorum queue that it was deleted, or lose the way
// to them, when the queue is declared again at once: they then get nothing until they connect
// anew. Leave two seconds between.
//
// The client cannot receive a message with headers nested more than 32 deep, or with more
// than 8192 in one table: it breaks the connection with "invalid field or value inside of
// a frame", again and again. Such a message must be removed from the queue by other means.
package inboxamqp

// Package inboxnats consumes messages from NATS JetStream.
//
//	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: "shop"}, billing, inbox.ConsumerConfig{})
//	err = consumer.Setup(ctx) // only where this process owns the stream
//	err = consumer.Run(ctx)
//
// It reads the messages of package outboxnats, CloudEvents, and Symfony's forms by Stream.Format. The id of a foreign message
// is its Nats-Msg-Id, a UUID v7, and its name is in the header holdfast-name. A message that cannot be read is a dead
// letter of class validation. It needs nats-server 2.9.
//
// # On the server
//
// Each consumer of a stream gets all its messages, by a durable pull consumer of its name. It has streams of its own:
//
//	<stream>=<consumer>=retries   copies of failed messages, until they are due
//	<stream>=<consumer>=dead      the dead letters, a subject for each class
//	<stream>=<consumer>=owners    leases and processes of Ordered consumers
//
// Their subjects begin with holdfast.<stream>.<consumer>. A stream of yours must not take these.
//
// A message is acknowledged when it was processed, or when its copy is stored elsewhere. The copy's Nats-Msg-Id names the
// original: if the acknowledgement is lost, the server drops a second copy within the duplicate window. Attempts are
// counted in the copies; deliveries by the server count nothing. A retry is delivered once before it is due and delayed by
// NakWithDelay. Its delay begins when the server stores it, by the server's clock, and ends by the clock of the consumer's
// host.
//
// Every 2 seconds a consumer tells the server which messages it is working on (InProgress). If a process dies, others get
// its messages 8 seconds later, the durable consumer's AckWait. Don't set BackOff there: its first step replaces AckWait.
//
// # Rights
//
// A user with limited rights needs to subscribe to _INBOX.>, or the connection's own inbox prefix, and to publish on these
// subjects, if it is the consumer billing of the stream shop. With Stream.Partitions its durable consumers are billing=0
// and so on: put * for billing in the subjects of $JS. A call without a right ends with its timeout.
//
//	Run          holdfast.shop.billing.> $JS.API.STREAM.INFO.shop=billing=retries
//	Run          $JS.ACK.shop.billing.> $JS.ACK.shop=billing=retries.billing.>
//	Run          $JS.API.CONSUMER.INFO.shop.billing $JS.API.CONSUMER.INFO.shop=billing=retries.billing
//	Run          $JS.API.CONSUMER.MSG.NEXT.shop.billing $JS.API.CONSUMER.MSG.NEXT.shop=billing=retries.billing
//	Ordered      $JS.API.STREAM.INFO.shop=billing=owners $JS.API.STREAM.MSG.GET.shop=billing=owners
//	Partitions   $JS.API.STREAM.PURGE.shop=billing=owners
//	DeadLetters  holdfast.shop.billing.retry.> $JS.API.STREAM.INFO.shop=billing=dead
//	DeadLetters  $JS.API.STREAM.MSG.GET.shop=billing=dead $JS.API.STREAM.MSG.DELETE.shop=billing=dead
//	Check        $JS.API.STREAM.INFO.* $JS.API.CONSUMER.INFO.*.billing
//	Setup        holdfast.shop.setup $JS.API.STREAM.INFO.shop $JS.API.STREAM.CREATE.* $JS.API.STREAM.UPDATE.shop
//	Setup        $JS.API.CONSUMER.INFO.*.billing $JS.API.CONSUMER.CREATE.*.billing.>
//	Setup        $JS.API.CONSUMER.CREATE.shop.billing=setup $JS.API.CONSUMER.DELETE.shop.billing=setup
//
// # Order
//
// With ConsumerConfig.Ordered one process works at a time; lease.go describes how. With Stream.Partitions several
// processes work: each partition is a durable consumer <consumer>=<partition> of its part of the subject. A process with
// more partitions than its share releases some. If a process dies, another takes over
// up to 16 seconds later. To change the number, stop the senders, wait until all messages are
// processed, and call Setup with the new number on a new stream name, or after deleting the stream and its consumers.
//
// # What may be lost or doubled
//
// nats-server syncs to the disk every 2 minutes unless sync_interval is set: after a power failure, messages and
// acknowledgements of a single server may be lost. Use Stream.Replicas in a cluster. After a kill, acknowledgements of
// the last moments may be undone, and those messages are redelivered: deduplicate them with inboxpgx.
//
// nats-server before 2.9.16 confirms and deletes messages that are published while it shuts down: stop the relays first.
//
// A replay stores the copy of a dead letter and then deletes the dead letter. If a removal deletes it in between, the
// removal counts it, although the message returns.
//
// Setup creates the stream with retention interest: a message is deleted when all durable consumers have processed it. A
// message that is published while there is no durable consumer is deleted at once. Setup may run while relays publish: a new
// stream gets its subjects after a consumer.
package inboxnats

// Package watermillbridge lets programs on Watermill (github.com/ThreeDotsLabs/watermill) publish through
// an outbox and receive through an inbox. It is its own module, github.com/holdfast-go/holdfast/modules/watermill,
// so that no other program compiles Watermill. The package name differs from the folder name, because a program
// that imports it also imports package watermill.
//
// A [Publisher] passes messages to a function. In a transaction this function writes to the outbox, and the
// messages commit with the data:
//
//	publisher := watermillbridge.NewPublisher(func(ctx context.Context, m outbox.Message) error {
//		return store.Write(ctx, tx, m)
//	})
//
// Outside of a transaction [Direct] sends to the broker at once and waits for its confirm. A crash between a
// commit and Publish then loses the message, as with any other Publisher of Watermill.
//
// A [Subscriber] runs one consumer of package inboxamqp or inboxredis for each subscription:
//
//	subscriber := watermillbridge.NewSubscriber(func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
//		cfg := inbox.ConsumerConfig{Name: "billing", Concurrency: 1}
//		return inboxredis.NewConsumer(client, inboxredis.Stream{Name: topic}, p, cfg)
//	})
//
// # Messages
//
// The topic is the message's name, with the grammar of outbox.Message.Name. The publisher's Router decides
// where it goes. On Redis Streams let it return the name as Exchange, the stream. On RabbitMQ the default
// exchange routes the message to the queue of that name.
//
// Metadata travels as headers, whatever texts it contains, so that errors can enter a PoisonQueue. A name or value
// that outbox.Message.Headers rejects, such as an error of several lines, is escaped, and a [Subscriber] restores it.
// The header watermill-escaped lists those names. A value over 4 KiB is cut. If there are more than 56 entries or
// 12 KiB, some are left out, and the header watermill-left-out has their number. A payload that is too large for the
// outbox is rejected.
//
// The metadata Content-Type is the content type. Without it a payload is application/json if it is JSON, and
// otherwise application/octet-stream. A content type that contradicts the payload travels in a header, with
// application/octet-stream in its place. [MetadataKey] is the ordering key. One that an outbox rejects travels in a
// header, with its hash in its place. A UUID of version 7 is the message's id, by which consumers detect duplicates.
// Any other UUID, such as from watermill.NewUUID, travels in a header, and each Publish is a message of its own to
// the consumers of this module.
//
// # Acks
//
// Ack settles the message. Nack requeues it after the consumer's RetryPolicy.BaseDelay, any number of times, and it
// never becomes a dead letter: Watermill's own middleware (Retry, PoisonQueue) decides that. A message that is
// neither acked nor nacked within HandlerTimeout has failed, and the attempt is counted, as with any handler.
// Messages that nobody has read from the channel, or that are unanswered when the subscription ends, are requeued
// without counting an attempt.
//
// The consumer's Concurrency is the number of messages in flight. With 1 they arrive in the order of the queue,
// except for repeated ones. Nothing here makes effects happen once: a message arrives at least once. Use inboxpgx
// with its handlers to skip duplicates.
package watermillbridge

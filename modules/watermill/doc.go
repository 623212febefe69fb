// Package watermillbridge lets programs on Watermill (github.com/ThreeDotsLabs/watermill) publish through
// an outbox and receive by an inbox. It is a module of its own, github.com/holdfast-go/holdfast/modules/watermill,
// so that no other program compiles Watermill. The package has another name than its folder, because a program
// that imports it also imports package watermill.
//
// A [Publisher] hands messages to a function. In a transaction that is the outbox, and the messages
// commit with the data:
//
//	publisher := watermillbridge.NewPublisher(func(ctx context.Context, m outbox.Message) error {
//		return store.Write(ctx, tx, m)
//	})
//
// Outside of one, [Direct] sends to the broker at once and waits for its confirm. A crash between a commit
// and Publish then loses the message, as with any other Publisher of Watermill.
//
// A [Subscriber] runs one consumer of package inboxamqp or inboxredis for each subscription:
//
//	subscriber := watermillbridge.NewSubscriber(func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
//		cfg := inbox.ConsumerConfig{Name: "billing", Concurrency: 1}
//		return inboxredis.NewConsumer(client, inboxredis.Stream{Name: topic}, p, cfg)
//	})
//
// # What becomes of a message
//
// The topic is the message's name, with the grammar of outbox.Message.Name: the Router of the publisher
// says where that goes. On Redis Streams let it return the name as Exchange, the stream. On RabbitMQ the
// default exchange takes it to the queue of that name.
//
// Metadata travels as headers, whatever texts it has, so that errors enter a PoisonQueue. A name or value
// that outbox.Message.Headers does not take, such as an error of several lines, is escaped, and a [Subscriber] restores it;
// the header watermill-escaped lists those names. A value over 4 KiB is cut. Of more than 56 entries, or 12 KiB,
// some are left out: the header watermill-left-out has how many. A payload that is too large for the outbox is refused.
//
// Content-Type there is the content type; without it a payload is application/json if it is JSON, and else
// application/octet-stream. One that the payload belies is application/octet-stream on its way, too. [MetadataKey] there is the ordering key; one that is
// no key of an outbox travels as its hash, and in a header. A UUID of version 7 is the message's
// id, by which consumers tell duplicates; any other, as watermill.NewUUID makes them, travels in a header,
// and each Publish is a message of its own to consumers of this module.
//
// # What becomes of an answer
//
// Ack settles the message. Nack has it come again after the consumer's RetryPolicy.BaseDelay, as often as
// it takes, and it never becomes a dead letter: Watermill's own middleware (Retry, PoisonQueue) decides
// that. A message that is neither acked nor nacked within HandlerTimeout has failed, counted, as with any
// handler. What nobody has taken from the channel, and what is not answered when the subscription ends,
// goes back uncounted.
//
// The consumer's Concurrency is how many messages are out at a time. With 1 they come in the order of the
// queue, but for those that come again. Nothing here makes effects happen once: a message comes at least
// once, and inboxpgx with its handlers is what deduplicates.
package watermillbridge

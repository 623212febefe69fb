// Package format has the values of the setting that says how messages look on the wire: Config.Format of the
// publishers (outboxamqp, outboxredis) and of the consumers (inboxamqp, inboxredis). A [Symfony] writes and reads
// messages as Symfony Messenger does, a [CloudEvents] writes CloudEvents 1.0 (https://cloudevents.io). Nil is
// this module's own form. One value serves both sides of a program:
//
//	form := format.Symfony{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}}
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop", Format: form})
//	consumer, err := inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{Format: form})
//
// examples/guides/wire.md has each form byte by byte, and lists what a program in PHP needs.
//
// # CloudEvents: attributes
//
//	id               the id of the message, a UUID v7
//	source           CloudEvents.Source
//	specversion      1.0
//	type             the name of the message
//	time             when it was written
//	datacontenttype  its content type
//	partitionkey     its ordering key (the extension "Partitioning"); absent without one
//
// Headers of a message named cloudEvents:<attribute> are attributes too, such as cloudEvents:subject, and
// win over source, time and partitionkey. Other headers, the trace context among them, stay what they are.
//
// # CloudEvents on RabbitMQ
//
// As the AMQP protocol binding has it, with the headers of AMQP 0-9-1 in place of application-properties:
// in binary mode the body is the data, content_type its type, and each other attribute a header
// cloudEvents:<attribute>; in structured mode content_type is application/cloudevents+json and the body the
// event in JSON, whose data is the body if that is JSON, else data_base64. Consumers read headers that
// begin with cloudEvents_ as well. The properties message_id, type and timestamp are set, too.
//
// # CloudEvents on Redis Streams
//
// No protocol binding knows them. Here the usual fields are there as ever; in binary mode each attribute
// but datacontenttype is a field ce_<attribute> more, as in the headers of the Kafka binding; in structured
// mode the field content-type is application/cloudevents+json and body has the event in JSON.
//
// # How consumers read CloudEvents
//
// Consumers read events in both modes as their own messages: give them the same [CloudEvents], or no Format.
// A message with the attributes id, source and type, and with specversion 1.0, is an event. What the
// transport's own properties leave empty is taken from it: id, name (type), key (partitionkey) and the time.
// Handlers get the data, and find the other attributes in inbox.Message.Headers: as cloudEvents:<attribute>,
// or as the sender named the header. Senders whose ids are no UUID v7 need inbox.ConsumerConfig.DeriveID. A structured event that
// cannot be read, or of another version, and a batch of events are dead letters of class validation.
package format

// Format is how messages look on the wire: a [Symfony] or a [CloudEvents]. Constructors refuse any other type.
type Format interface {
	// Form names the form: "symfony" or "cloudevents".
	Form() string
}

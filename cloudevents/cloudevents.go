// Package cloudevents says how messages look as CloudEvents 1.0 (https://cloudevents.io). A [Format] is a
// value of the setting Config.Format of the publishers (outboxamqp, outboxredis):
//
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop", Format: cloudevents.Format{Source: "/shop"}})
//
// Consumers (inboxamqp, inboxredis) read events in both modes without being told, as their own
// messages: give them the same Format, or none.
//
// # Attributes
//
//	id               the id of the message, a UUID v7
//	source           Format.Source
//	specversion      1.0
//	type             the name of the message
//	time             when it was written
//	datacontenttype  its content type
//	partitionkey     its ordering key (the extension "Partitioning"); absent without one
//
// Headers of a message named cloudEvents:<attribute> are attributes too, such as cloudEvents:subject, and
// win over source, time and partitionkey. Other headers, the trace context among them, stay what they are.
//
// # On RabbitMQ
//
// As the AMQP protocol binding has it, with the headers of AMQP 0-9-1 in place of application-properties:
// in binary mode the body is the data, content_type its type, and each other attribute a header
// cloudEvents:<attribute>; in structured mode content_type is application/cloudevents+json and the body the
// event in JSON, whose data is the body if that is JSON, else data_base64. Consumers read headers that
// begin with cloudEvents_ as well. The properties message_id, type and timestamp are set, too.
//
// # On Redis Streams
//
// No protocol binding knows them. Here the usual fields are there as ever; in binary mode each attribute
// but datacontenttype is a field ce_<attribute> more, as in the headers of the Kafka binding; in structured
// mode the field content-type is application/cloudevents+json and body has the event in JSON.
//
// # What consumers do
//
// A message with the attributes id, source and type, and with specversion 1.0, is an event. What the
// transport's own properties leave empty is taken from it: id, name (type), key (partitionkey) and the time.
// Handlers get the data, and find the other attributes in inbox.Message.Headers: as cloudEvents:<attribute>,
// or as the sender named the header. Senders whose ids are no UUID v7 need inbox.ConsumerConfig.DeriveID. A structured event that
// cannot be read, or of another version, and a batch of events are dead letters of class validation.
package cloudevents

// Format has messages published as CloudEvents 1.0.
type Format struct {
	// Source is the attribute source: a URI reference that names who sends, such as "/shop" or
	// "https://example.com/shop", of at most 1024 bytes. Required.
	Source string
	// Structured puts a whole event into the body, in JSON. Default: binary mode, in which the body is the
	// message's own.
	Structured bool
}

// Form implements format.Format.
func (Format) Form() string { return "cloudevents" }

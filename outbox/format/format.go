// Package format has the message formats: the Format of publishers (outboxamqp.Config, outboxredis.Config)
// and of consumers (inboxamqp.Queue, inboxredis.Stream). A [Symfony] writes and reads messages like Symfony
// Messenger. A [CloudEvents] writes CloudEvents 1.0 (https://cloudevents.io). Nil is Holdfast's own format. One value
// serves both sides of a program:
//
//	form := format.Symfony{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}}
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop", Format: form})
//	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Format: form}, processor, inbox.ConsumerConfig{})
//
// examples/guides/wire.md shows each format byte by byte, and lists the requirements of a program in PHP.
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
// Headers named cloudEvents:<attribute> are attributes too, such as cloudEvents:subject. They override source, time
// and partitionkey. Other headers, including the trace context, are sent as plain headers.
//
// # CloudEvents on RabbitMQ
//
// The format follows the AMQP protocol binding, with AMQP 0-9-1 headers instead of application-properties. In binary
// mode, the body is the data, content_type is its type, and every other attribute is a header
// cloudEvents:<attribute>. In structured mode, content_type is application/cloudevents+json and the body is the event
// in JSON. Its data is the message body if that is JSON, else data_base64 is set. Consumers also accept headers with
// the prefix cloudEvents_. The properties message_id, type and timestamp are set too.
//
// # CloudEvents on Redis Streams
//
// There is no protocol binding for Redis Streams. Our usual fields are always present. In binary mode, each attribute
// except datacontenttype has an additional field ce_<attribute>, like the headers of the Kafka binding. In structured
// mode, the field content-type is application/cloudevents+json and body has the event in JSON.
//
// # How consumers read CloudEvents
//
// Consumers read events in both modes like their own messages: configure the same [CloudEvents], or no Format. A
// message with the attributes id, source and type, and with specversion 1.0, is an event. Attributes fill the empty
// properties of the transport: id, name (type), key (partitionkey) and time. Handlers receive the data, and find the
// other attributes in inbox.Message.Headers: as cloudEvents:<attribute>, or under the sender's header name. If a
// sender's ids are not UUID v7, set inbox.ConsumerConfig.DeriveID. Three kinds of messages become dead letters of
// class validation: a structured event that cannot be read, an event of another version, and a batch of events.
package format

// Format is a message format: a [Symfony] or a [CloudEvents]. Constructors reject any other type.
type Format interface {
	// Form returns the name of the format: "symfony" or "cloudevents".
	Form() string
}

// Symfony is the format of an application with Symfony Messenger. PHP decodes one header per stamp and rejects the
// whole message if it does not know a stamp's class. Only the stamps configured here are therefore sent.
//
// With Classes alone, it fits an unmodified Symfony with the serializer messenger.transport.symfony_serializer: the
// header type has the class, and there is no stamp. The zero Symfony adds nothing to sent messages. When reading, it
// takes the id and the name from stamps MessageIdStamp and MessageNameStamp of any namespace, and uses an unknown
// class as the name. Every Symfony reads bodies that PHP has serialized; other consumers do not.
type Symfony struct {
	// Classes maps message names to PHP classes: "order.placed" to `App\Message\OrderPlaced`, without a leading
	// backslash. Each class belongs to one name. A name without an entry is sent unchanged, and a class without an
	// entry becomes the name. Optional.
	Classes map[string]string
	// IDStamp is the class of the stamp with the message's id, in its property messageId, or id for
	// Symfony\Component\Messenger\Stamp\MessageIdStamp of Symfony 8.2. Empty: the stamp is not sent. On RabbitMQ the
	// property message_id has the id too, and Symfony's own retries keep it. On Redis, PHP gets the id only from this
	// stamp, and only this stamp keeps it through PHP's retries.
	IDStamp string
	// NameStamp is the class of the stamp with the message's name, in its property messageName. Empty: the stamp is
	// not sent.
	NameStamp string
}

// Freyr02 returns the Symfony for the PHP library freyr/message-broker 0.2: unchanged names, and the library's
// stamps.
func Freyr02() Symfony {
	return Symfony{IDStamp: `Freyr\MessageBroker\Inbox\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Serializer\MessageNameStamp`}
}

// Freyr03 returns the Symfony for the PHP library freyr/message-broker 0.3 and 0.4, whose stamps have other
// namespaces.
func Freyr03() Symfony {
	return Symfony{IDStamp: `Freyr\MessageBroker\Contracts\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Contracts\MessageNameStamp`}
}

// Form implements Format.
func (Symfony) Form() string { return "symfony" }

// CloudEvents publishes messages as CloudEvents 1.0. The package's documentation lists the attributes.
type CloudEvents struct {
	// Source is the attribute source: a URI reference that identifies the sender, such as "/shop" or
	// "https://example.com/shop", of at most 1024 bytes. Required.
	Source string
	// Structured puts the whole event into the body, in JSON. Default: binary mode, in which the body is the
	// message's own body.
	Structured bool
}

// Form implements Format.
func (CloudEvents) Form() string { return "cloudevents" }

// Package format has the values of the setting that says how messages look on the wire: the Format of
// publishers (outboxamqp.Config, outboxredis.Config) and of consumers (inboxamqp.Queue, inboxredis.Stream). A [Symfony] writes and reads
// messages as Symfony Messenger does, a [CloudEvents] writes CloudEvents 1.0 (https://cloudevents.io). Nil is
// this module's own form. One value serves both sides of a program:
//
//	form := format.Symfony{Classes: map[string]string{"order.placed": `App\Message\OrderPlaced`}}
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop", Format: form})
//	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Format: form}, books, inbox.ConsumerConfig{})
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

// Symfony is how messages look to an application with Symfony Messenger. PHP decodes a header for each stamp and
// refuses the whole message when it does not know the class of one, so only stamps that are named here are sent.
//
// With Classes alone it is for Symfony as it is, with the serializer messenger.transport.symfony_serializer: the
// header type has the class, and there is no stamp. The zero Symfony sends nothing for Symfony; on
// the way in it reads the id and the name from stamps MessageIdStamp and MessageNameStamp of any
// namespace, and takes the class of a message for its name. Bodies that PHP has serialized are read with any
// Symfony, and by no other consumer.
type Symfony struct {
	// Classes are the PHP classes of messages by their names: "order.placed" to
	// `App\Message\OrderPlaced`, without a leading backslash. Each class stands for one name. A name
	// that is not here goes out as it is, and a class that is not here is a name. Optional.
	Classes map[string]string
	// IDStamp is the class of the stamp with the message's id, in its property messageId. Empty: no
	// such stamp is sent; on RabbitMQ the property message_id has the id, and Symfony's own retries keep
	// it. On Redis nothing else tells PHP the id, nor carries it through a retry of PHP's.
	IDStamp string
	// NameStamp is the class of the stamp with the message's name, in its property messageName. Empty:
	// no such stamp is sent.
	NameStamp string
}

// Freyr02 is the Symfony for the PHP library freyr/message-broker, 0.2: names as they are, and its
// stamps.
func Freyr02() Symfony {
	return Symfony{IDStamp: `Freyr\MessageBroker\Inbox\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Serializer\MessageNameStamp`}
}

// Freyr03 is the Symfony for the PHP library freyr/message-broker, 0.3 and 0.4, which has its stamps
// elsewhere.
func Freyr03() Symfony {
	return Symfony{IDStamp: `Freyr\MessageBroker\Contracts\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Contracts\MessageNameStamp`}
}

// Form implements Format.
func (Symfony) Form() string { return "symfony" }

// CloudEvents publishes messages as CloudEvents 1.0. The package's documentation lists the attributes.
type CloudEvents struct {
	// Source is the attribute source: a URI reference that names who sends, such as "/shop" or
	// "https://example.com/shop", of at most 1024 bytes. Required.
	Source string
	// Structured puts a whole event into the body, in JSON. Default: binary mode, in which the body is the
	// message's own.
	Structured bool
}

// Form implements Format.
func (CloudEvents) Form() string { return "cloudevents" }

// Package symfony says how messages look to Symfony Messenger. A [Format] is a value of the setting
// Config.Format of the publishers (outboxamqp, outboxredis) and of the consumers (inboxamqp, inboxredis):
// one for both sides of a program.
//
//	format := symfony.Stock(map[string]string{"order.placed": `App\Message\OrderPlaced`})
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "shop", Format: format})
//	consumer, err := inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{Format: format})
//
// PHP decodes a header for each stamp and refuses the whole message when it does not know the class of
// one, so no stamp is sent that the Format does not name. What all of it looks like on the wire, and
// what PHP's side needs, is in examples/guides/wire.md.
package symfony

// Format is how messages look to a Symfony application. The zero Format sends nothing for Symfony; on
// the way in it reads the id and the name from stamps MessageIdStamp and MessageNameStamp of any
// namespace, and takes the class of a message for its name. Bodies that PHP has serialized are read by any
// symfony.Format, and by no other consumer.
type Format struct {
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

// Stock is the Format for Symfony Messenger as it is, with its serializer
// messenger.transport.symfony_serializer: the header type has the class, and there is no stamp.
func Stock(classes map[string]string) Format { return Format{Classes: classes} }

// Freyr02 is the Format for the PHP library freyr/message-broker, 0.2: names as they are, and its
// stamps.
func Freyr02() Format {
	return Format{IDStamp: `Freyr\MessageBroker\Inbox\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Serializer\MessageNameStamp`}
}

// Freyr03 is the Format for the PHP library freyr/message-broker, 0.3 and 0.4, which has its stamps
// elsewhere.
func Freyr03() Format {
	return Format{IDStamp: `Freyr\MessageBroker\Contracts\MessageIdStamp`, NameStamp: `Freyr\MessageBroker\Contracts\MessageNameStamp`}
}

// Form implements format.Format.
func (Format) Form() string { return "symfony" }

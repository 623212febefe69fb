package format

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

// Package outboxamqp publishes outbox messages to RabbitMQ.
//
// A Publisher is a driver.Publisher for outbox.NewRelay. The relay calls its Run,
// which keeps the connection:
//
//	dial := outboxamqp.Dial("amqp://localhost/", amqp.Config{})
//	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "events"})
//	relay, err := outbox.NewRelay(source, publisher, outbox.RelayConfig{})
//	err = relay.Run(ctx)
//
// # Guarantees
//
// A message counts as published after the broker confirmed it and a queue accepted it. Messages are mandatory and
// persistent, and a returned message is a failure. Many messages are in flight at once, so the round trip to the
// broker does not limit the rate. Dial opens connections that put many messages into one write, which saves a
// third of the processor time of publishing. Any other function that opens connections works too.
//
// After the first fault a connection is replaced, with a growing backoff between attempts. The messages in its
// window are reported as unavailable. The broker may have some of them, so they may arrive twice. A broker that
// does not answer for seven seconds counts as gone, whether or not a message waits for it; each MiB being sent
// adds a second. The client's own connection recovery must be off. While the broker blocks publishers (a memory or
// disk alarm), messages fail as blocked, within one and a half Config.Timeout.
//
// A message that the broker rejects does not fail other messages. The exchange is missing, the user has no
// permission for the exchange or topic, or the message is too large. The broker then closes the channel. The other
// messages in flight on the channel are published again, so they may arrive twice. A refused exchange or topic is
// tried again after five seconds. Only Setup declares exchanges.
//
// # The form on the wire
//
// Properties: message_id is the id, type the name, and the delivery mode is persistent. content_type is omitted
// for application/json. timestamp (in seconds) is omitted if it differs by less than a second from the time in the
// id. Consumers assume both defaults. So a message without a key and headers, with a name of up to 23 bytes, has
// at most 64 bytes of properties. With more bytes a classic queue accepts an eighth fewer messages a second. With
// Config.Format both properties are always set, because other readers need them. Header values are text.
//
// The header holdfast-key contains the ordering key, if the message has one. Such a message has a second routing
// key, which the broker reads from the header CC: holdfast.slot.<n>, where n is the CRC-32 (IEEE) of the key
// modulo 64. Package inboxamqp uses it to split a queue into any number of partitions. A binding such as *.*.* or
// *.*.# therefore matches every message with a key. On RabbitMQ 4, a user with topic permissions needs permission
// for this key, too. Headers named CC are replaced.
//
// With Config.Format the header "type" contains the class for the name, and the headers of stamps repeat the id
// and name; or messages are CloudEvents. Package outbox/format describes both. examples/guides/wire.md describes
// the form for other languages.
//
// # Limits
//
// Several channels of one connection publish. Messages of a key use the same channel, in the order of the calls.
// RabbitMQ keeps the order of a channel in each queue. A message that fails and is published again comes after the
// later ones, so the relay holds back the other messages of its key. Messages without a key have no order. All
// headers of a message together have at most 64 KiB.
package outboxamqp

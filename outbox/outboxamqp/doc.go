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
// # What it promises
//
// A message counts as published when the broker has confirmed it and a queue
// took it: messages are mandatory and persistent, and a returned one is a
// failure. Many messages are in flight at once, so the round trip
// to the broker does not limit the rate. Dial opens connections that put many
// messages into one write, which saves a third of the processor time of publishing;
// any other function that opens connections will do.
//
// A connection is used until the first fault, then replaced with a growing
// pause between the attempts. The messages in its window are reported as
// unavailable: the broker may have some of them, so they may arrive twice.
// A broker that does not answer for seven seconds counts as gone (a second
// more for each MiB on its way), whether or not a message waits for it.
// The client's own connection recovery must be off. While the broker blocks
// publishers (a memory or disk alarm), messages fail as blocked, within
// one and a half Config.Timeout.
//
// A message that the broker refuses fails alone: its exchange is missing or
// closed to this user, or its topic is, or it is too large. The broker closes
// the channel over it, and what was on its way there is published once more, so
// it may arrive twice. A refused exchange or topic is tried again after five
// seconds. Exchanges are declared by Setup, and by nothing else.
//
// # The form on the wire
//
// Properties: message_id is the id, type the name, delivery mode persistent. content_type is there unless it
// is application/json, and timestamp (in seconds) where the time in the id is a second or more away from when
// the message was stored; consumers know both without. So a message without a key and headers, whose name has
// up to 23 bytes, has at most 64 bytes of properties: with more a classic queue takes an eighth fewer messages a
// second. With Config.Format both are always there, for readers of other forms. Headers are text; the ordering key, where there is one, is in
// holdfast-key. Such a message has a second routing key, which the broker reads in the header CC:
// holdfast.slot.<n>, where n is the CRC-32 (IEEE) of the key modulo 64. By it package inboxamqp splits a
// queue into partitions, however many. A binding such as *.*.* or *.*.# takes every message with a key for
// it. On RabbitMQ 4 a user whose topics are restricted needs to be allowed that key, too. Headers named CC
// are replaced. With Config.Format the
// header "type" has the class that stands for the name, and headers of stamps have id and name once
// more, or messages are CloudEvents, as package outbox/format says. examples/guides/wire.md has all of it for other languages.
//
// # Limits
//
// Several channels of one connection publish; messages of a key share one, in the
// order of the calls. RabbitMQ keeps the order of a channel in each queue, but a
// message that fails and is published again comes after those behind it; the relay
// holds the messages of a key back for that. Messages without a key have no order.
// All headers of a message together have at most 64 KiB.
package outboxamqp

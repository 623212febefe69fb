// Package outboxredis publishes outbox messages to Redis Streams.
//
// Every message is one XADD with the fields id, name, content-type, key,
// created-at (RFC 3339), headers (a JSON object) and body. Consumers tell
// duplicates by the field id, not by the id of the stream entry. With
// Config.Format the field message has headers and body, for Symfony Messenger, or
// messages are CloudEvents, as package outbox/format says.
//
// [Publisher] gathers what arrives while a pipeline is on its way into the next
// pipeline, so it is fast for many messages and prompt for one. In a Redis Cluster
// each stream has a pipeline of its own, at the same time as the others.
//
// # Guarantees and limits
//
// A message counts as published once Redis has answered its XADD. How durable
// that is depends on the server: with appendfsync everysec a crash may lose the
// last second, and a failover what was not replicated. With MaxLen Redis drops
// the oldest entries, read or not. Entries of one ordering key keep their order,
// since a relay sends the next one only after the answer to the one before.
//
// Config.Partitions splits a stream for ordered consumers in several processes, by the ordering key;
// package inboxredis has the rule, and the steps to another number.
//
// A client that retries (MaxRetries, on by default) may append a message twice
// when an answer is lost. Give it ContextTimeoutEnabled: otherwise a call to a
// server that hangs is left behind after Timeout, with its connection, until the
// client's own timeouts end it.
//
// A message fails alone if its stream's key is of another type or closed to this
// user, and if Redis ends the connection over it. What Redis says of itself (out
// of memory, read only, loading) holds for all of them; a node of a Redis Cluster
// that is down pauses the streams of the others too, as far as they share a
// transport.
package outboxredis

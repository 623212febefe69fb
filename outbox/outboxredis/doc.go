// Package outboxredis publishes outbox messages to Redis Streams.
//
// Every message is one XADD with the fields id, name, content-type, key, created-at (RFC 3339), headers (a JSON
// object) and body. Consumers detect duplicates by the field id, not by the id of the stream entry. With
// Config.Format the field message contains headers and body, for Symfony Messenger, or messages are CloudEvents;
// see package outbox/format.
//
// [Publisher] collects messages that arrive while a pipeline is in flight into the next pipeline. So it is fast
// for many messages and prompt for one. In a Redis Cluster each stream has its own pipeline, and the pipelines run
// concurrently.
//
// # Guarantees and limits
//
// A message counts as published when Redis has answered its XADD. Its durability depends on the server. With
// appendfsync everysec a crash may lose the last second, and a failover may lose messages that were not
// replicated. With MaxLen Redis deletes the oldest entries, read or not. Entries of one ordering key keep their
// order, because a relay sends the next one only after the reply for the previous one.
//
// Config.Partitions splits a stream by the ordering key, for ordered consumers in several processes. Package
// inboxredis describes the rule, and the steps to change the number.
//
// A client that retries (MaxRetries, on by default) may append a message twice if a reply is lost. Set its
// ContextTimeoutEnabled: otherwise a call to a hanging server is abandoned after Timeout, and keeps its connection
// until the client's own timeouts end it.
//
// A message does not fail others if its stream's key has another type or is closed to this user, or if Redis
// closes the connection because of the message. States of the server (out of memory, read only, loading) fail all
// messages. If a node of a Redis Cluster is down, the streams of other nodes pause too, as far as they share a
// transport.
// transport.
package outboxredis

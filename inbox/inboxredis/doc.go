// Package inboxredis consumes messages from Redis Streams, and keeps copies of a message apart by a
// claim in Redis. Each works without the other:
//
//	consumer, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: "orders"}, billing, inbox.ConsumerConfig{})
//	err = consumer.Setup(ctx) // only where this process owns the group
//	err = consumer.Run(ctx)
//
//	processor, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "billing"})
//
// The heads of partitions.go, claim.go (how a message is claimed) and processor.go describe the details.
//
// # Consuming a stream
//
// Each group of a stream gets all its messages. A Consumer reads what package outboxredis writes
// (the fields id, name, content-type, key, created-at, headers and body), and what Symfony's Redis
// transport writes (the field message, with its default serializer or none), by Stream.Format,
// and CloudEvents, as package outbox/format says. What it cannot read is
// a dead letter of class validation with its fields as they are. It needs Redis 7.0.
//
// Besides the stream it uses keys that begin with {<stream>}:<group>:, or, where the stream's name has
// a hash tag such as {shop}orders, with <stream>::<group>:. A colon of the group's name is %3A there.
// All are in one slot of a Cluster:
//
//	retries         a stream of the retries that are due; no other group sees them
//	later           the retries that wait, by the time when they are due
//	failed.<class>  the dead letters, a stream for each class, <prefix> before its name
//	owner           the lease of ordered consumers
//	probe           is written by Ready
//	processes.<n>   who shares n partitions
//
// A message stays pending in its group until it was processed, or until its copy is stored elsewhere,
// which is one step with its end. Every 2 seconds a consumer tells Redis what it is at; what none
// has told of for 8 seconds, since its process died, goes to another consumer of the group. Delays
// go by the clock of Redis, and end up to a second late.
//
// Entries that all groups have processed are removed every 10 seconds, as far as Redis frees whole
// nodes of the stream (XTRIM ~), unless Stream.KeepProcessed is set. A group that is not read keeps
// the stream from being trimmed: Check names it. A limit on the stream's length, such as
// outboxredis.Config.MaxLen or Symfony's stream_max_entries, drops what is not read yet, and
// Symfony's delete_after_ack takes from the other groups what one of them has processed. What was
// deleted while it was in work is still retried when it fails, but lost when its process dies; the
// log tells how much of that was found.
//
// # Order
//
// With ConsumerConfig.Ordered one process of the group is served at a time: it holds a lease of 8
// seconds, which every script looks at. When it dies another one takes over, and first takes all that
// is pending, in order. Stream.Partitions has several processes at work. A process that was stopped for longer than its lease may still finish what it has begun, beside
// the new owner: its handlers' effects need a processor that deduplicates, and dead letters and
// retries of it are refused.
//
// # What may be lost
//
// Redis confirms before a replica has the message, and before it is on the disk: use appendonly, and
// min-replicas-to-write, which Check asks for. After a failover acknowledgements may be undone, and
// those messages come again, not marked as redelivered; deduplicate them. A retry that was undone comes
// again as the attempt before it, or as the one that a ledger knows of. When the stream or the group is
// gone, as after FLUSHALL, Ready and the log say so, and Setup makes it again: Run never does.
// Without memory (maxmemory with noeviction) retries and dead letters wait in their consumers, and
// the others are processed.
//
// # Guarantees, and what is missing
//
// Best effort. Effect and mark are not atomic: when the process or Redis dies between the
// handler's success and the mark, or when the lease runs out under a handler that was
// stopped for so long, a copy runs the handler again. When Redis loses its data, or evicts
// keys (use maxmemory-policy noeviction), copies are not recognised. No message is lost
// through any of these. A handler that must take effect once belongs to inboxpgx.
package inboxredis

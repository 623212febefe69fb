// Package inboxredis consumes messages from Redis Streams, and skips duplicates of a message by a claim in Redis.
// The two parts work independently:
//
//	consumer, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: "orders"}, billing, inbox.ConsumerConfig{})
//	err = consumer.Setup(ctx) // only where this process owns the group
//	err = consumer.Run(ctx)
//
//	processor, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "billing"})
//
// The comments at the top of partitions.go, claim.go (how a message is claimed) and processor.go describe the
// details.
//
// # Consuming a stream
//
// Each group of a stream gets all its messages. A Consumer reads the form of package outboxredis (the fields id,
// name, content-type, key, created-at, headers and body). It also reads the form of Symfony's Redis transport (the
// field message, with its default serializer or none), according to Stream.Format, and CloudEvents, see package
// outbox/format. An unreadable entry becomes a dead letter of class validation with its original fields. The
// consumer needs Redis 7.0.
//
// Besides the stream it uses keys that start with {<stream>}:<group>:, or with <stream>::<group>: if the stream's
// name has a hash tag, for example {shop}orders. A colon in the group's name becomes %3A. All keys are in one slot
// of a Cluster:
//
//	retries         a stream of the retries that are due; other groups do not read it
//	later           the waiting retries, by due time
//	failed.<class>  the dead letters, a stream for each class, <prefix> before its name
//	owner           the lease of ordered consumers
//	probe           written by Ready
//	processes.<n>   the processes that share n partitions
//
// A message stays pending in its group until it is processed, or until its copy is stored elsewhere; storing the
// copy and ending the original is one step. Every 2 seconds a consumer renews its messages in flight. If a message
// is not renewed for 8 seconds, because its process crashed, another consumer of the group claims it. Delays use
// the clock of Redis, and end up to a second late.
//
// Every 10 seconds, entries that all groups have processed are removed, as far as Redis frees whole nodes of the
// stream (XTRIM ~), unless Stream.KeepProcessed is set. A group that nobody reads prevents trimming; Check reports
// it. A limit on the stream's length, such as outboxredis.Config.MaxLen or Symfony's stream_max_entries, deletes
// unread messages. Symfony's delete_after_ack deletes messages that other groups have not processed yet. A message
// that was deleted while in flight is still retried when it fails, but is lost when its process crashes. The log
// contains the number of lost messages that were found.
//
// # Order
//
// With ConsumerConfig.Ordered one process of the group is served at a time. It holds a lease of 8 seconds, which
// every script checks. When it crashes another process takes the lease, and first takes all pending entries, in
// order. With Stream.Partitions several processes work. A process that was frozen for longer than its lease may
// finish its running handlers while the new owner works. Their effects need a processor that deduplicates; its
// dead letters and retries are rejected.
//
// # Possible loss
//
// Redis confirms a message before a replica or the disk has it. Use appendonly and min-replicas-to-write; Check
// asks for the latter. A failover may undo acknowledgements. Those messages are delivered again, and are not
// marked as redelivered; deduplicate them. A message whose retry was undone is delivered again as the attempt
// before, or as the attempt in the ledger. If the stream or the group no longer exists, for example after
// FLUSHALL, Ready and the log report it. Setup creates it again; Run never does. Without memory (maxmemory with
// noeviction) retries and dead letters wait in their consumers, and other messages are processed.
//
// # Guarantees of the Processor
//
// Deduplication in Redis is best effort, because the effect and the mark are not atomic. A duplicate runs the
// handler again if the process or Redis crashes between the handler's success and the mark, or if the lease
// expires because the handler was frozen. Duplicates are not detected if Redis loses its data or evicts keys (use
// maxmemory-policy noeviction). No message is lost in these cases. For a handler that must take effect once, use
// inboxpgx.
package inboxredis

// Package inboxredis consumes messages from Redis Streams, and keeps copies of a message apart by a
// claim in Redis. Each works without the other:
//
//	consumer, err := inboxredis.NewConsumer(client, "orders", processor, inboxredis.Config{Group: "billing"})
//	err = consumer.Setup(ctx) // only where this process owns the group
//	err = consumer.Run(ctx)
//
//	processor, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "billing"})
//
// # Consuming a stream
//
// Each group of a stream gets all its messages. A Consumer reads what package outboxredis writes
// (the fields id, name, content-type, key, created-at, headers and body), and what Symfony's Redis
// transport writes (the field message, with its default serializer or none), by Config.Format,
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
// nodes of the stream (XTRIM ~), unless Config.KeepProcessed is set. A group that is not read keeps
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
// is pending, in order. Config.Partitions has several processes at work. A process that was stopped for longer than its lease may still finish what it has begun, beside
// the new owner: its handlers' effects need a processor that deduplicates, and dead letters and
// retries of it are refused.
//
// # Partitions
//
// With Config.Partitions of 4 an ordered stream orders is the streams orders.0 to orders.3, each with
// its group, lease, retries and dead letters: all that was said of a stream is true of each of them.
// A message is in the partition CRC-32 modulo 4 of its key: the CRC-32 (IEEE) of zlib, unsigned, of the
// key's UTF-8 bytes. Without a key it is that of the id as text, such as
// 0198a7a4-0000-7000-8000-000000000001, so that those are spread. outboxredis does so where its Config
// names the same number, and other senders must.
//
// Run runs one consumer for each partition, side by side. Concurrency, Batch, Prefetch and the limits of
// single handlers are those of each partition: a process that serves 4 of them with a Concurrency of 8
// runs up to 32 handlers. TimeLimit, MessageLimit and MemoryLimit end the whole Run, and MessageLimit counts
// the messages of all partitions. A message that may have ended the process runs alone in it. Each partition pauses by
// itself while a server is down. While the node of one is down, in a Cluster, the others are served. Run
// waits for messages with one connection for each partition that it serves: the client's pool must have these.
//
// The attribute queue in logs and metrics names the partition, but for the metric dead_letters, which counts those of
// all partitions by the name of the stream.
//
// Each process asks for all leases, and notes every 2 seconds that it takes part (processes.<partitions>, among the keys
// of the first partition). About every 10 seconds it compares the leases that it holds with its share: the number of
// partitions divided by the number of processes, rounded up. It gives up those above the share. It reads no more of the
// partition, waits for the handlers that run, as at the end of Run, returns the lease, and asks for it again 2 seconds
// later. The next process tries a message that waits for a retry at once; without a ledger its attempts begin anew. A process
// that dies is counted for 8 seconds more. More processes than partitions are reserves.
//
// Another number of partitions has keys in other places. To change it:
//
//  1. Stop what writes: the relays. Their outbox keeps the messages.
//  2. Replay or remove the dead letters where partitions become fewer: each returns to its own.
//  3. Wait until the consumers have processed all: XINFO GROUPS tells lag 0 and pending 0 of each
//     partition and its retries, and the keys later are gone. Stop them.
//  4. Set the number in senders and consumers, call Setup, start the consumers, then the relays.
//  5. Delete the streams that are not read any more, and Check is content.
//
// The stream without partitions is as another number: it keeps its plain name.
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
// # How the claim of a message works
//
// The key of a message is outbox:processed:<message id>, or
// outbox:processed:<namespace>:<message id> when there is a namespace. Consumers that share a
// Redis must have different ones, or they take each other's messages for processed. Before
// the handler the key is claimed (SET NX, value processing:<token>) with a short lease that is
// prolonged while the handler runs. After it the key becomes done:<token> for 8 days, or is
// removed when the handler failed, so that a retry may claim it. A token, new for each
// delivery, keeps a holder that lost its claim from removing that of another.
//
// A message whose key says done is skipped and counts as done. So does one whose key holds
// something else than this package writes, such as a set or another text: that is how other
// systems note what they have processed. A message that is claimed by another delivery is
// postponed, never acknowledged: if the other one dies its claim runs out.
//
// # Guarantees, and what is missing
//
// Best effort. Effect and mark are not atomic: when the process or Redis dies between the
// handler's success and the mark, or when the lease runs out under a handler that was
// stopped for so long, a copy runs the handler again. When Redis loses its data, or evicts
// keys (use maxmemory-policy noeviction), copies are not recognised. No message is lost
// through any of these. A handler that must take effect once belongs to inboxpgx.
//
// # Before inboxpgx
//
// Where the next processor deduplicates by itself, as *inboxpgx.Store does, nothing is claimed.
// Redis is asked first and believed only when it says that a message is done; everything else is
// for the next processor, whose guarantees stay. That saves transactions where many copies come.
// The keys are the same. A consumer also gets the ledger, the pauses and the pruning of the next processor.
//
// # Without Redis
//
// While Redis cannot be reached no handler runs: the result is inbox.Unavailable, after 6 seconds
// at the latest, whatever the client's own timeouts are. Before inboxpgx messages go on without
// it, after 100 ms at the latest.
package inboxredis

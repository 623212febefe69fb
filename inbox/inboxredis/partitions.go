package inboxredis

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	partitions "github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Partitions.
//
// With Stream.Partitions of 4 an ordered stream orders consists of the streams orders.0 to orders.3. Each has its
// own group, lease, retries and dead letters; everything about a stream applies to each partition. The partition
// of a message is the CRC-32 of its key modulo 4: zlib's CRC-32 (IEEE), unsigned, of the key's UTF-8 bytes.
// Without a key it is the CRC-32 of the id as text, such as 0198a7a4-0000-7000-8000-000000000001, so that those
// messages are spread. outboxredis does this if its Config has the same number of partitions; other senders must
// do it too.
//
// Run runs one consumer for each partition concurrently. Concurrency, Batch, Prefetch and the handler limits apply
// to each partition: a process that serves 4 partitions with a Concurrency of 8 runs up to 32 handlers. TimeLimit,
// MessageLimit and MemoryLimit end the whole Run; MessageLimit counts the messages of all partitions. A message
// that may have crashed the process runs alone in the process. Each partition pauses independently while a server
// is down. In a Cluster, if the node of one partition is down, the others are served. Run waits for messages with
// one connection for each served partition, so the client's pool must be large enough.
//
// The attribute queue in logs and metrics names the partition. Only the metrics dead_letters and backlog name the
// stream, and count the messages of all partitions.
//
// Each process asks for all leases, and records every 2 seconds that it takes part (processes.<partitions>, among
// the keys of the first partition). About every 10 seconds it compares its leases with its share: the number of
// partitions divided by the number of processes, rounded up. It releases the partitions above its share. For each,
// it stops reading, waits for running handlers as on shutdown, returns the lease, and asks for it again 2 seconds
// later. The next process tries a message that waits for a retry at once; without a ledger its attempts start at 1
// again. A crashed process counts for another 8 seconds. If there are more processes than partitions, the others
// stand by.
//
// Another number of partitions moves keys to other partitions. To change it:
//
//  1. Stop the writers: the relays. Their outbox keeps the messages.
//  2. If the number decreases, replay or remove the dead letters first: each returns to its own partition.
//  3. Wait until the consumers have processed everything: XINFO GROUPS reports lag 0 and pending 0 for each
//     partition and its retries, and the keys later no longer exist. Stop the consumers.
//  4. Set the number in senders and consumers, call Setup, start the consumers, then the relays.
//  5. Delete the streams that are no longer read; until then Check reports them.
//
// A stream without partitions counts as another number: it keeps its plain name.

// aside is how long a process does not ask for a lease that it released. Others ask every second.
const aside = 2 * claimEvery

// newGroups returns the consumer group of each partition.
func newGroups(client redis.UniversalClient, s *settings) (groups []*group) {
	for _, k := range s.partitions {
		groups = append(groups, newGroup(client, s, k))
	}
	return groups
}

// newRunner returns the consumer of the stream, or of all partitions.
func newRunner(groups []*group, p inbox.Processor, cfg engine.Config) (runner, error) {
	run := newRun()
	if len(groups) == 1 {
		return engine.New(newSource(groups[0], run), p, cfg)
	}
	first := groups[0]
	var parts []*source
	var all []partitions.Partition
	for _, g := range groups {
		s := newSource(g, run)
		parts = append(parts, s)
		all = append(all, partitions.Partition{Name: g.keys.stream, Source: s})
	}
	m := &members{group: first, key: first.keys.processes(len(groups)), run: run}
	return partitions.New(p, partitions.Config{
		Consumer: cfg, Whole: partitions.NewWhole(parts), Partitions: all, Aside: aside, Leveling: first.cfg.leveling,
		Members: &partitions.Records{Every: renewEvery, Note: m.note, Leave: m.leave, Log: first.log},
	})
}

// members are the processes that share the partitions. Each process records its presence on the server of the first
// partition.
type members struct {
	group *group
	key   string
	run   string // this process
}

// note records that this process takes part, and counts all that do.
func (m *members) note(ctx context.Context) (int, error) {
	n, err := m.group.script(ctx, shareScript, []string{m.key}, m.run, claimIdle.Milliseconds())
	return int(n), err
}

func (m *members) leave(ctx context.Context) error {
	_, err := redisconn.Within(ctx, m.group.cfg.Timeout, func(ctx context.Context) (int64, error) {
		return m.group.client.ZRem(ctx, m.key, m.run).Result()
	})
	return err
}

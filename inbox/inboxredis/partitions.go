package inboxredis

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	partitions "github.com/holdfast-go/holdfast/inbox/internal/group"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Partitions.
//
// With Stream.Partitions of 4 an ordered stream orders is the streams orders.0 to orders.3, each with
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

const (
	// leaveTimeout bounds the last call of a process that ends.
	leaveTimeout = time.Second
	// aside is how long a process does not ask for a lease that it has given up: others ask every second.
	aside = 2 * claimEvery
)

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
	w := &whole{source: newSource(first, run)}
	var all []partitions.Partition
	for _, g := range groups {
		s := newSource(g, run)
		w.parts = append(w.parts, s)
		all = append(all, partitions.Partition{Name: g.keys.stream, Source: s})
	}
	return partitions.New(p, partitions.Config{
		Consumer: cfg, Whole: w, Partitions: all, Aside: aside, Leveling: first.cfg.leveling,
		Members: &members{group: first, key: first.keys.processes(len(groups)), run: run},
	})
}

// whole counts for all partitions. It is never opened.
type whole struct {
	*source
	parts []*source
}

// Backlog implements driver.Measured.
func (w *whole) Backlog(ctx context.Context) (sum driver.Backlog, err error) {
	for _, part := range w.parts {
		b, err := part.Backlog(ctx)
		if err != nil {
			return sum, err
		}
		sum.Waiting, sum.Retrying, sum.PutOff = sum.Waiting+b.Waiting, sum.Retrying+b.Retrying, sum.PutOff+b.PutOff
	}
	return sum, nil
}

// DeadLetters implements driver.Keeper.
func (w *whole) DeadLetters() driver.DeadLetters {
	var all []driver.DeadLetters
	for _, part := range w.parts {
		all = append(all, part.DeadLetters())
	}
	return driver.JoinDeadLetters(all...)
}

// members are the processes that share the partitions. Each notes on the server of the first one that it takes part.
type members struct {
	group *group
	key   string
	run   string // this process
	count atomic.Int64
}

// Run implements Members of package group.
func (m *members) Run(ctx context.Context) {
	var seldom telemetry.Seldom
	for ctx.Err() == nil {
		n, err := m.group.script(ctx, shareScript, []string{m.key}, m.run, claimIdle.Milliseconds())
		if err == nil {
			m.count.Store(n)
		} else if repeats, due := seldom.Due(); due && ctx.Err() == nil {
			m.group.log.WarnContext(ctx, "inbox: processes not counted", slog.Any("error", err), slog.Int("repeats", repeats))
		}
		_ = runloop.Sleep(ctx, renewEvery)
	}
	m.count.Store(0)
	// Where this fails the process is counted for a while.
	_, _ = redisconn.Within(context.WithoutCancel(ctx), leaveTimeout, func(ctx context.Context) (int64, error) {
		return m.group.client.ZRem(ctx, m.key, m.run).Result()
	})
}

// Count implements Members of package group.
func (m *members) Count(context.Context) int { return int(m.count.Load()) }

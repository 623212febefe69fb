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

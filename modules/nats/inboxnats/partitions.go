package inboxnats

import (
	"context"
	"crypto/rand"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const (
	// memberEvery is the interval in which a process records that it takes part. The server forgets it after
	// leaseTime.
	memberEvery = 2 * time.Second
	// leaveTimeout bounds the last call of a process that is shutting down.
	leaveTimeout = time.Second
	// aside is how long a process does not take back a lease it has released: others try twice a second.
	aside = 4 * leaseEvery
)

// newRunner returns the consumer of the stream or of all partitions.
func newRunner(s *settings, parts []*source, p inbox.Processor) (runner, error) {
	cfg := engine.Config{ConsumerConfig: s.ConsumerConfig, Queue: s.Stream.Name, Package: component, Timeout: s.Timeout, MaxBodyBytes: s.maxBodyBytes}
	if len(parts) == 1 {
		return engine.New(parts[0], p, cfg)
	}
	var all []group.Partition
	for _, part := range parts {
		all = append(all, group.Partition{Name: part.queue, Source: part})
	}
	return group.New(p, group.Config{
		Consumer: cfg, Whole: &whole{parts[0], parts}, Partitions: all, Aside: aside, Leveling: s.leveling,
		Members: &members{source: parts[0], run: rand.Text()[:10]},
	})
}

// whole adds up all partitions. It is never opened.
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

// members are the processes that share the partitions. Each has a message in the stream of leases.
type members struct {
	source *source
	run    string // this process
	count  atomic.Int64
}

// Run implements Members of package group.
func (m *members) Run(ctx context.Context) {
	var seldom telemetry.Seldom
	for ctx.Err() == nil {
		n, err := m.note(ctx)
		if err == nil {
			m.count.Store(int64(n))
		} else if repeats, due := seldom.Due(); due && ctx.Err() == nil {
			m.source.log.WarnContext(ctx, "inbox: processes not counted", slog.Any("error", err), slog.Int("repeats", repeats))
		}
		_ = runloop.Sleep(ctx, memberEvery)
	}
	m.count.Store(0)
	// If this fails, the process is counted until its message expires.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if stream, err := m.source.js.Stream(ctx, m.source.owners); err == nil {
		_ = stream.Purge(ctx, jetstream.WithPurgeSubject(m.source.members+m.run))
	}
}

// note records that this process takes part, and counts all that do.
func (m *members) note(ctx context.Context) (int, error) {
	if err := m.source.call(ctx, "note the process", func(ctx context.Context) error {
		_, err := m.source.js.Publish(ctx, m.source.members+m.run, nil)
		return err
	}); err != nil {
		return 0, err
	}
	info, err := m.source.stat(ctx, m.source.owners, m.source.members+"*")
	if err != nil {
		return 0, err
	}
	n := 0
	for subject := range info.State.Subjects {
		if strings.HasPrefix(subject, m.source.members) {
			n++
		}
	}
	return n, nil
}

// Count implements Members of package group.
func (m *members) Count(context.Context) int { return int(m.count.Load()) }

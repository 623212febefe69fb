package inboxnats

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
)

const (
	// memberEvery is the interval in which a process records that it takes part. The server forgets it after
	// leaseTime.
	memberEvery = 2 * time.Second
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
	m := &members{parts[0]}
	return group.New(p, group.Config{
		Consumer: cfg, Whole: group.NewWhole(parts), Partitions: all, Aside: aside, Leveling: s.leveling,
		Members: &group.Records{Every: memberEvery, Note: m.note, Leave: m.leave, Log: s.log},
	})
}

// members are the processes that share the partitions. Each has a message in the stream of leases.
type members struct{ source *source }

func (m *members) leave(ctx context.Context) error {
	stream, err := m.source.js.Stream(ctx, m.source.owners)
	if err != nil {
		return err
	}
	return stream.Purge(ctx, jetstream.WithPurgeSubject(m.source.members+m.source.name))
}

// note records that this process takes part, and counts all that do.
func (m *members) note(ctx context.Context) (int, error) {
	if err := m.source.call(ctx, "note the process", func(ctx context.Context) error {
		_, err := m.source.js.Publish(ctx, m.source.members+m.source.name, nil)
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

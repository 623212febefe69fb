package inboxamqp

import (
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// partitioned reports whether the consumer reads several queues.
func (s *settings) partitioned() bool { return s.Partitions > 1 }

// partition is the name of a partition's queue.
func (s *settings) partition(i int) string { return partition.Name(s.queue, i) }

// validatePartitions reports every violation that has to do with Config.Partitions.
func (s *settings) validatePartitions(fail func(format string, args ...any)) {
	if err := partition.Check(s.Partitions); err != nil {
		fail("Config.Partitions: %w", err)
	}
	if !s.partitioned() {
		return
	}
	if !s.Ordered {
		fail("Config.Partitions needs Ordered")
	}
	if s.Key != nil {
		fail("Config.Partitions excludes Config.Key: the sender's key says which partition a message is in")
	}
	if s.ParkKeys {
		fail("Config.Partitions excludes Config.ParkKeys: the parked keys of all partitions are kept together")
	}
}

// whole is the source of all queues of the consumer.
func (s *source) whole() driver.Source {
	if !s.cfg.partitioned() || s.cfg.Partitions > partition.Max {
		return s
	}
	return newPartitions(s)
}

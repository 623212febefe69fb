package inboxamqp

import (
	"strconv"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// maxPartitions bounds Config.Partitions: each is a replicated queue, and a channel in every process.
const maxPartitions = 64

// partitioned reports whether the consumer reads several queues.
func (s *settings) partitioned() bool { return s.Partitions > 1 }

// partitions returns the queues of a partitioned consumer, in the order in which they are bound: which
// keys each has depends on it.
func (s *settings) partitions() []string {
	if !s.partitioned() {
		return nil
	}
	names := make([]string, s.Partitions)
	for i := range names {
		names[i] = s.partition(i)
	}
	return names
}

func (s *settings) partition(i int) string { return s.queue + "." + strconv.Itoa(i) }

// validatePartitions reports every violation that has to do with Config.Partitions.
func (s *settings) validatePartitions(fail func(format string, args ...any)) {
	if s.Partitions < 0 || s.Partitions > maxPartitions {
		fail("Config.Partitions %d is not from 0 to %d", s.Partitions, maxPartitions)
	}
	if !s.partitioned() {
		return
	}
	if !s.Ordered {
		fail("Config.Partitions needs Ordered")
	}
	if s.Key != nil {
		fail("Config.Partitions goes by the header with the key, and not by Config.Key")
	}
	if s.ParkKeys {
		fail("Config.Partitions does not go with ParkKeys: keys that are stored know no partition")
	}
}

// whole is the source of all queues of the consumer.
func (s *source) whole() driver.Source {
	if !s.cfg.partitioned() || s.cfg.Partitions > maxPartitions {
		return s
	}
	return newPartitions(s)
}

package group

import (
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// CheckPartitions returns the violated rules of a number of partitions. Their texts begin with the name of its field.
func CheckPartitions(field string, n int, cfg inbox.ConsumerConfig) (problems []error) {
	if err := partition.Check(n); err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", field, err))
	}
	if n > 1 && !cfg.Ordered {
		problems = append(problems, errors.New(field+" needs ConsumerConfig.Ordered: without it several processes share one stream"))
	}
	if n > 1 && cfg.Key != nil {
		problems = append(problems, errors.New(field+" excludes ConsumerConfig.Key: the sender's key selects the partition"))
	}
	if n > 1 && cfg.ParkKeys {
		problems = append(problems, errors.New(field+" excludes ConsumerConfig.ParkKeys: the parked keys of all partitions are kept together"))
	}
	return problems
}

// Memory has the properties of a processor that remembers messages.
type Memory struct {
	Remembers bool          // processed messages
	Retention time.Duration // of processed messages
	Ledger    bool          // it counts attempts
}

// MemoryOf returns the memory of a processor.
func MemoryOf(p inbox.Processor) Memory {
	if d, ok := p.(driver.Deduplicator); ok {
		return Memory{Remembers: true, Retention: d.Retention(), Ledger: d.Ledger() != nil}
	}
	return Memory{Retention: driver.DefaultRetention}
}

// Check adds the findings of a consumer whose processor remembers too little.
func (m Memory) Check(cfg inbox.ConsumerConfig, found *check.Findings) {
	if window := driver.Horizon(cfg.Retry); m.Remembers && m.Retention > 0 && m.Retention < window {
		found.Add("lengthen the Retention of the processor, or shorten ConsumerConfig.Retry.MaxAge",
			"a message may be retried for %v, and is remembered for %v: after that it takes effect again", window, m.Retention)
	}
	if cfg.Ordered && !m.Ledger {
		found.Add("use a processor with a ledger, such as inboxpgx", "the attempts of an ordered message are lost when the process ends: the processor keeps no ledger")
	}
}

package inboxtest

import (
	"errors"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// Config configures a Consumer. The zero value works.
type Config struct {
	// ConsumerConfig is as for every consumer. A queue with an Ordered consumer serves one consumer
	// at a time. DeadLetterPrefix changes nothing in memory.
	inbox.ConsumerConfig
	// Names are the names of the messages that come to the queue, or patterns such as order.*,
	// where * stands for one word between dots and # for any number. Default: all.
	Names []string
	// Fault is asked what becomes of each step, and must not block; m is nil where the step is none
	// of a message's. It is called from many goroutines. DeliverTwice is one. Optional.
	Fault func(at Step, m *inbox.Message) Outcome
}

func (c Config) withDefaults() Config {
	if len(c.Names) == 0 {
		c.Names = []string{"#"}
	}
	return c
}

func (c Config) fault() memqueue.Fault {
	if c.Fault == nil {
		return nil
	}
	return func(at memqueue.Step, m *inbox.Message) memqueue.Outcome {
		return memqueue.Outcome(c.Fault(Step(at), m))
	}
}

func check(b *Broker, queue string) error {
	var problems []error
	if b == nil {
		problems = append(problems, errors.New("inboxtest: Broker is nil"))
	}
	if queue == "" {
		problems = append(problems, errors.New("inboxtest: the queue is empty"))
	}
	return errors.Join(problems...)
}

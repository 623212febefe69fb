package inbox

import (
	"log/slog"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// ConsumerConfig configures a consumer of any transport. The zero value works.
type ConsumerConfig struct {
	// Name tells consumers apart in dead letters and on the broker. Default: the name of the processor, such as that of
	// an inboxpgx.Store; without one the queue's name.
	Name string
	// Concurrency is how many messages, or batches, are processed at once. Default: 8.
	Concurrency int
	// Batch is how many messages are given to the processor together, at most: as many as
	// have gathered while all workers were busy. It is made for inboxpgx, which then needs
	// one transaction for all; there a Concurrency of 1 to 4 is enough. Messages that have
	// failed before are processed one by one. Default: 1.
	Batch int
	// Prefetch is how many messages the broker hands out before they are settled: from
	// Concurrency to 2000. Brokers count messages and not bytes, so that so many bodies, of up to 16 MiB
	// each, may be in memory. Default: twice Concurrency times Batch, at most 2000.
	Prefetch int
	// HandlerTimeout bounds the work on one message. The wait for a rate limit is part of it, and
	// takes half of it at most. The context then ends, and the message has failed. A batch of n
	// messages gets n times as long, together, but no more than a third of the time for which the
	// broker waits for acknowledgements, or 10 minutes where that has no end. When that is over
	// inboxpgx blames none of them: each is tried alone. A handler that has not returned 5 seconds
	// later is reported by the log and by Ready. Default: 60 s.
	HandlerTimeout time.Duration
	// MaxCrashes is how many times in a row the process may end while a message is being
	// processed, before that is a dead letter of class quarantined. The first crash is not
	// counted: nothing was noted yet. From the second time on the message runs alone.
	// It needs a processor that keeps a ledger, as inboxpgx does. Default: 5.
	MaxCrashes int
	// Ordered has messages of one ordering key processed one at a time, in the order in which they
	// arrive, retries included: while a failed message waits, it keeps its place and its key waits
	// behind it, and other keys go on. When it becomes a dead letter its key goes on. It needs a
	// source that is served to one process at a time; see the transport's doc. Messages without a
	// key have no order. Default: no order.
	Ordered bool
	// ParkKeys has a key wait when its message becomes a dead letter, and go on when that is replayed
	// or removed by DeadLetters: then the messages that have come in between are processed in their
	// order, and those that come later after them. Until then they are kept, with the dead letter, by
	// the processor; inboxpgx has tables for them, and stops keys for all consumers of a Store. It needs Ordered. Switched off while keys wait,
	// it leaves them there, which Check of inboxpgx finds: replay or remove their dead letters before.
	// Default: keys go on.
	ParkKeys bool
	// MaxParked is about how many messages may wait with ParkKeys, dead letters included. When there are
	// so many, what else arrives for a key that waits stays with the broker: it fills the window, then
	// the consumer takes no more messages of any key, and Ready says so, until dead letters are replayed
	// or removed. A dead letter is stored all the same. It bounds the processor's store: 100,000
	// messages of 10 kB are 1 GB. Default: 100,000.
	MaxParked int
	// Key returns the ordering key of a message, for senders that set none. The goroutine that receives
	// calls it, so it must be quick whatever the body is. With ParkKeys the processor calls it, too, from many
	// goroutines, and it must return the same key each time. Default: Message.Key.
	Key func(m *Message) string
	// DeriveID is called for messages whose id is missing or not a UUID v7, for senders that
	// set none, and returns the id to use: the same for every copy of a message. uuid.Nil
	// or a panic refuses the message. The goroutine that receives calls it, so it must be quick whatever
	// the body is. Optional; without it all such messages are refused.
	DeriveID func(m *Message) uuid.UUID

	// Retry says how often and how late a failed message is tried again.
	Retry RetryPolicy
	// DeadLetterPrefix is put before the names of the dead-letter queues, such as <prefix>failed.default. On RabbitMQ
	// two consumers with the same prefix share their dead letters. At most 128 bytes. Default: on RabbitMQ the
	// queue's name and a dot; the keys of Redis Streams have the names of stream and group without it.
	DeadLetterPrefix string
	// Classes are the classes with a dead-letter queue of their own, besides default. On Redis and in memory
	// validation, unrecoverable and quarantined have one as well; on RabbitMQ they may be listed here. Dead letters
	// of any other class are in the queue of default, and keep their class. Each is one more queue. Optional.
	Classes []string

	// TimeLimit, MessageLimit and MemoryLimit end Run in good order, so that a supervisor
	// starts the process afresh: after this time, after this many messages were handed to the
	// processor, or when the Go runtime holds more than this many bytes. Default: no limit.
	TimeLimit    time.Duration
	MessageLimit int
	MemoryLimit  uint64
	// ShutdownTimeout is how long Run takes to end, at most. The context of running messages is
	// cancelled before that, with the cause ErrDraining: a tenth of it, but no more than
	// 6 s, is left to settle them. Default: 60 s.
	ShutdownTimeout time.Duration

	// Rand returns numbers from 0 up to 1 that spread retries and pauses. It is called from
	// many goroutines. Default: math/rand/v2.
	Rand func() float64
	// Logger receives failed messages and lost connections. Default: slog.Default().
	Logger *slog.Logger
	// TracerProvider makes one span per message, in the sender's trace, or per batch, linked to the
	// senders'. Default: the global one.
	TracerProvider trace.TracerProvider
	// MeterProvider counts outcomes. Default: the global one.
	MeterProvider metric.MeterProvider
}

// RetryPolicy says how often and how late a failed message is tried again. The zero value
// is 6 attempts: the retries come after 1, 2, 4, 8 and 16 seconds, each ±20 %.
//
// RabbitMQ waits up to half of a delay and 1.5 s longer, because its delays are fixed.
type RetryPolicy struct {
	// MaxAttempts bounds the attempts of messages whose failures are neither recoverable nor
	// unrecoverable, the first one included: 1 means no retry. Default: 6.
	MaxAttempts int
	// BaseDelay is the delay before the first retry; at least 1 ms. Default: 1 s.
	BaseDelay time.Duration
	// MaxDelay bounds every delay, jitter included. Default: 60 s, or BaseDelay if that is longer.
	MaxDelay time.Duration
	// Multiplier is the growth of the delay from retry to retry; at least 1. Default: 2.
	Multiplier float64
	// Jitter spreads a delay over 1-Jitter, 1 and 1+Jitter times itself; less than 1.
	// Default: 0.2. A negative number means no jitter.
	Jitter float64
	// MaxAge bounds the retries of recoverable failures: a message whose first failure
	// is longer ago is given up. It must stay below the time for which processed messages are
	// remembered. Default: 24 h.
	MaxAge time.Duration
}

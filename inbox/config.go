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
	// Name identifies the consumer in dead letters and on the broker, and is the attribute consumer of its metrics. The
	// metrics of an inboxpgx.Store have the Store's name. Default: the name of the processor, such as that of an
	// inboxpgx.Store; if it has none, the name of the queue.
	Name string
	// Concurrency is how many messages, or batches, are processed at the same time. Default: 8.
	Concurrency int
	// Batch is the maximum number of messages passed to the processor together. A batch has the messages that
	// arrived while all workers were busy. Use it with inboxpgx, which then needs one transaction per batch;
	// a Concurrency of 1 to 4 is enough there. Messages that have failed before are processed one by one.
	// Default: 1.
	Batch int
	// Prefetch is how many messages the broker delivers before they are settled: from Concurrency to 2000.
	// Brokers count messages and not bytes, so this many bodies, of up to 16 MiB each, may be in memory.
	// Default: twice Concurrency times Batch, at most 2000.
	Prefetch int
	// HandlerTimeout bounds the work on one message. It includes the wait for a rate limit, which takes at
	// most half of it. At the timeout the context ends and the message has failed. A batch of n messages gets
	// n times as long, but at most a third of the broker's ack timeout, or 10 minutes if the broker has none.
	// If a batch times out, inboxpgx tries each of its messages alone. A handler that has not returned 5
	// seconds after the timeout is logged, and Ready reports it. Default: 60 s.
	HandlerTimeout time.Duration
	// MaxCrashes is how many times in a row the process may end while it processes a message, before the
	// message becomes a dead letter of class quarantined. The first crash is not counted because nothing was
	// recorded before it. From the second run on the message runs alone. It needs a processor that keeps a
	// ledger, such as inboxpgx. Default: 5.
	MaxCrashes int
	// Ordered processes the messages of one ordering key one at a time, in the order of arrival, retries
	// included. A failed message keeps its place until its retry. Its key waits behind it, and other keys
	// continue. When it becomes a dead letter, its key continues. Ordered needs a source that serves one
	// process at a time; see the doc of the transport. Messages without a key have no order. Default: no
	// order.
	Ordered bool
	// ParkKeys stops a key when one of its messages becomes a dead letter. The processor keeps the dead
	// letter and the later messages of the key; inboxpgx has tables for them, and stops a key for all
	// consumers of a Store. When the dead letter is replayed or removed by DeadLetters, the kept messages are
	// processed in their order, and newer ones after them. ParkKeys needs Ordered. Before you switch it off,
	// replay or remove the dead letters: messages of keys that still wait stay in the tables, and Check of
	// inboxpgx reports them. Default: keys continue.
	ParkKeys bool
	// MaxParked is about how many messages may wait with ParkKeys, dead letters included. At that number,
	// further messages for a waiting key stay with the broker. When they fill the prefetch window, the
	// consumer receives no messages of any key and Ready returns an error, until dead letters are replayed or
	// removed. A dead letter is always stored. MaxParked bounds the processor's store: 100,000 messages of 10
	// kB are 1 GB. Default: 100,000.
	MaxParked int
	// Key returns the ordering key of a message, for senders that set none. The goroutine that receives calls
	// it, so it must be quick for every body. With ParkKeys the processor also calls it, from many
	// goroutines, and it must return the same key each time. Default: Message.Key.
	Key func(m *Message) string
	// DeriveID returns an id for a message whose id is missing or not a UUID v7, for senders that set none.
	// The id must be the same for every copy of a message. If it returns uuid.Nil or panics, the message is
	// rejected. The goroutine that receives calls it, so it must be quick for every body. Optional; without
	// it all such messages are rejected.
	DeriveID func(m *Message) uuid.UUID

	// Retry sets how often, and after which delays, a failed message is retried.
	Retry RetryPolicy
	// DeadLetterPrefix precedes the names of the dead-letter queues, such as <prefix>failed.default. On
	// RabbitMQ two consumers with the same prefix share their dead letters. At most 128 bytes. Default: on
	// RabbitMQ the name of the queue and a dot. On Redis Streams the keys contain the names of stream and
	// group anyway.
	DeadLetterPrefix string
	// Classes are the classes with a dead-letter queue of their own, besides default. On Redis and in memory
	// validation, unrecoverable and quarantined always have one; on RabbitMQ list them here if you want one.
	// Dead letters of any other class are in the queue of default, and keep their class. Each class adds one
	// queue. Optional.
	Classes []string

	// TimeLimit, MessageLimit and MemoryLimit end Run with a clean shutdown, so that a supervisor restarts
	// the process: after this time, after this many messages were passed to the processor, or when the Go
	// runtime holds more than this many bytes. Default: no limit.
	TimeLimit    time.Duration
	MessageLimit int
	MemoryLimit  uint64
	// ShutdownTimeout bounds the shutdown of Run. Near its end the context of running messages is cancelled
	// with the cause ErrDraining. The last tenth of it, at most 6 s, is reserved for settling. Default: 60 s.
	ShutdownTimeout time.Duration

	// Rand returns numbers in [0, 1) that spread retries and pauses. It is called from many goroutines.
	// Default: math/rand/v2.
	Rand func() float64
	// Logger receives failed messages and lost connections. Default: slog.Default().
	Logger *slog.Logger
	// TracerProvider makes one span per message, in the sender's trace, or per batch, linked to the
	// senders'. Default: the global one.
	TracerProvider trace.TracerProvider
	// MeterProvider counts outcomes. Default: the global one.
	MeterProvider metric.MeterProvider
}

// RetryPolicy sets how often, and after which delays, a failed message is retried. The zero value is 6
// attempts: the retries come after 1, 2, 4, 8 and 16 seconds, each ±20 %.
//
// RabbitMQ waits up to half of a delay and 1.5 s longer, because its delays are fixed.
type RetryPolicy struct {
	// MaxAttempts bounds the attempts of messages whose failures are neither recoverable nor unrecoverable,
	// including the first attempt: 1 means no retry. Default: 6.
	MaxAttempts int
	// BaseDelay is the delay before the first retry; at least 1 ms. Default: 1 s.
	BaseDelay time.Duration
	// MaxDelay bounds every delay, jitter included. Default: 60 s, or BaseDelay if that is longer.
	MaxDelay time.Duration
	// Multiplier is the factor between one delay and the next; at least 1. Default: 2.
	Multiplier float64
	// Jitter multiplies each delay by 1-Jitter, 1 or 1+Jitter, chosen at random; less than 1. Default: 0.2. A
	// negative number means no jitter.
	Jitter float64
	// MaxAge bounds the retries of recoverable failures: a message whose first failure is older becomes a
	// dead letter. It must be less than the retention of processed messages. Default: 24 h.
	MaxAge time.Duration
}

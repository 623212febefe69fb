package inboxpgx

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
)

const (
	defaultTable     = "holdfast_inbox"
	maxConsumerBytes = 200
)

// Config configures a Store. The zero value works.
type Config struct {
	// Schema holds the tables. Default: the connection's search_path decides.
	Schema string
	// Table is the name of the table of entries; that of the ledger is <Table>_attempts, those
	// of stopped ordering keys and their messages are <Table>_stopped and <Table>_waiting, and that of paused
	// consumers is <Table>_pause.
	// Default: holdfast_inbox.
	Table string
	// ByName configures the handlers of single message names. Run of a consumer refuses a name without a handler. Optional.
	ByName map[string]HandlerConfig
	// Isolation of the transactions; the entry is as sure at every level.
	// Default: the Transactor's own, which is SERIALIZABLE unless configured.
	Isolation pgx.TxIsoLevel
	// Retention is how long entries are kept. It must be longer than any copy of a message
	// may come later than the first: retries, time in the queue and in the dead-letter
	// queue together. That of a message that is parked is kept until its turn has come.
	// Default: 8 days.
	Retention time.Duration
	// PruneInterval is the time between two looks for entries older than Retention, while a
	// consumer runs. A negative value turns them off; then call Prune. Default: 1 minute.
	PruneInterval time.Duration
	// Entries keeps the entries elsewhere than in the tables, as inboxtest.New does in memory.
	// Optional.
	Entries driver.Entries
	// Logger receives what goes wrong while pruning. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider of the counters holdfast.inbox.messages and holdfast.inbox.pruned.
	// Default: the global one.
	MeterProvider metric.MeterProvider
}

// HandlerConfig configures one handler. The zero value works.
type HandlerConfig struct {
	// Waiter blocks the worker before each message, ahead of the Prepare step and of the
	// transaction, for at most half of ConsumerConfig.HandlerTimeout; see inbox.Blocking. When it fails
	// the message is postponed, uncounted. Optional.
	Waiter inbox.Waiter
	// Timeout bounds the work on one delivery: the Prepare step and the transaction with
	// its retries, not the Waiter; in a batch, the Prepare step and each call of the handler.
	// When it ends before the handler could begin, for want of a connection, the message is
	// postponed, uncounted. Default: ConsumerConfig.HandlerTimeout.
	Timeout time.Duration
	// Concurrency bounds how many messages of the name, or batches with some of them, a consumer in
	// this process works on at once, for a handler that needs something scarce; the other messages
	// of its queue go on. Messages that it keeps back wait in the consumer, up to eight times Prefetch, so that this
	// process has them and other processes do not. When there are more, they are put off if other names share the
	// queue, and else nothing more is received. Default: no bound but ConsumerConfig.Concurrency.
	Concurrency int
}

func (c Config) withDefaults() Config {
	c.Table = cmp.Or(c.Table, defaultTable)
	c.Retention = cmp.Or(c.Retention, inboxdriver.DefaultRetention)
	return c
}

func (c Config) validate() error {
	var problems []error
	switch c.Isolation {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		problems = append(problems, fmt.Errorf("inboxpgx: Config.Isolation %q is not read committed, repeatable read or serializable", c.Isolation))
	}
	if c.Retention < 0 {
		problems = append(problems, fmt.Errorf("inboxpgx: Config.Retention %v is negative", c.Retention))
	}
	for name, h := range c.ByName {
		if h.Timeout < 0 {
			problems = append(problems, fmt.Errorf("inboxpgx: Config.ByName[%q].Timeout %v is negative", name, h.Timeout))
		}
		if h.Concurrency < 0 {
			problems = append(problems, fmt.Errorf("inboxpgx: Config.ByName[%q].Concurrency %d is negative", name, h.Concurrency))
		}
	}
	return errors.Join(problems...)
}

func checkConsumer(consumer string) error {
	switch {
	case consumer == "":
		return errors.New("inboxpgx: consumer is empty")
	case len(consumer) > maxConsumerBytes || !utf8.ValidString(consumer) || strings.ContainsRune(consumer, 0):
		return fmt.Errorf("inboxpgx: consumer must be at most %d bytes of text", maxConsumerBytes)
	}
	return nil
}

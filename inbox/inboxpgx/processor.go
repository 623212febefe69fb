package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/txretry"
)

const maxConsumerBytes = 200

// Config configures a Processor. Consumer is required.
type Config struct {
	// Consumer names who processes: each consumer processes each message once. It must
	// never change while copies of processed messages may still arrive. 1 to 200 bytes.
	Consumer string
	// Schema and Table say where the entries are, as in SchemaConfig.
	Schema, Table string
	// Dedup replaces the table; nil means the table.
	Dedup Dedup
	// Isolation of the transactions; "" means the Transactor's own, SERIALIZABLE by default.
	// The entry is as sure at every level.
	Isolation pgx.TxIsoLevel
	// MeterProvider of the counter holdfast.inbox.messages; nil means the global one.
	MeterProvider metric.MeterProvider
	// Hooks are optional.
	Hooks Hooks
}

// Hooks are called from the goroutine that processes the message; they must not block.
type Hooks struct {
	// OnDuplicate is called when a message was skipped because it had been processed.
	OnDuplicate func(ctx context.Context, m *inbox.Message)
}

func (c Config) validate() error {
	var problems []error
	switch {
	case c.Consumer == "":
		problems = append(problems, errors.New("inboxpgx: Config.Consumer is empty"))
	case len(c.Consumer) > maxConsumerBytes || !utf8.ValidString(c.Consumer) || strings.ContainsRune(c.Consumer, 0):
		problems = append(problems, fmt.Errorf("inboxpgx: Config.Consumer must be at most %d bytes of text", maxConsumerBytes))
	}
	switch c.Isolation {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		problems = append(problems, fmt.Errorf("inboxpgx: Config.Isolation %q is not read committed, repeatable read or serializable", c.Isolation))
	}
	return errors.Join(problems...)
}

// Processor is an inbox.Processor whose handlers run in a transaction together with the
// message's dedup entry. Register all handlers first; then it is safe for concurrent use.
type Processor struct {
	transactor txretry.Transactor
	cfg        Config
	dedup      Dedup
	mux        *inbox.Mux
	count      counter
}

// NewProcessor returns a Processor without handlers.
func NewProcessor(t txretry.Transactor, cfg Config) (*Processor, error) {
	var problems []error
	if t == nil {
		problems = append(problems, errors.New("inboxpgx: Transactor is nil"))
	}
	problems = append(problems, cfg.validate())
	table, err := NewTable(SchemaConfig{Schema: cfg.Schema, Table: cfg.Table})
	problems = append(problems, err)
	count, err := newCounter(cfg)
	problems = append(problems, err)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	p := &Processor{transactor: t, cfg: cfg, dedup: cfg.Dedup, mux: inbox.NewMux(), count: count}
	if p.dedup == nil {
		p.dedup = table
	}
	return p, nil
}

// Use adds middleware around every message, outside the transaction; see inbox.Mux.Use.
func (p *Processor) Use(wrap ...inbox.Middleware) { p.mux.Use(wrap...) }

// Fallback registers a handler, outside any transaction, for messages of names that have
// none; see inbox.Mux.Fallback.
func (p *Processor) Fallback(h inbox.Handler) { p.mux.Fallback(h) }

// Process implements inbox.Processor: one transaction for all messages, as the package
// comment describes. Batches are made by the consumer (inboxamqp.Config.Batch).
func (p *Processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	if len(msgs) < 2 {
		return p.mux.Process(ctx, msgs)
	}
	return p.batch(ctx, msgs)
}

package inboxpgx

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

const (
	defaultTable     = "holdfast_inbox"
	maxConsumerBytes = 200
)

// ErrIgnored is inside every error about a change of the Store's tables that Postgres accepted but did not
// make, because a trigger, a rule or a row-level-security policy dropped it. The message is not done. The
// consumer holds messages back as in an outage, and Check names the cause.
var ErrIgnored = pgcall.ErrIgnored

// Config configures a Store. The zero value works.
type Config struct {
	// Schema is the schema of the tables. Default: the connection's search_path selects it.
	Schema string
	// Table is the name of the table of entries. The ledger is <Table>_attempts, stopped ordering keys and
	// their messages are <Table>_stopped and <Table>_waiting, and paused consumers are <Table>_pause.
	// Default: holdfast_inbox.
	Table string
	// ByName configures the handlers of single message names. A consumer's Run fails if a name has no
	// handler. Optional.
	ByName map[string]HandlerConfig
	// Isolation is the isolation level of the transactions. Entries are reliable at every level. Default: the
	// level of the Transactor, which is SERIALIZABLE unless configured.
	Isolation pgx.TxIsoLevel
	// Retention is how long entries are kept. It must be longer than the longest delay of any copy of a
	// message: retries, time in the queue and time in the dead-letter queue together. The entry of a parked
	// message is kept until the message was processed. Default: 8 days.
	Retention time.Duration
	// PruneInterval is the time between two passes that delete entries older than Retention, while a consumer
	// runs. A negative value turns them off; then call Prune. Default: 1 minute.
	PruneInterval time.Duration
	// Entries replaces the tables by another store, as inboxtest.New does with memory. Optional.
	Entries driver.Entries
	// Logger receives failures of pruning. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider of the counters holdfast.inbox.messages and holdfast.inbox.pruned.
	// Default: the global one.
	MeterProvider metric.MeterProvider
}

// HandlerConfig configures one handler. The zero value works.
type HandlerConfig struct {
	// Waiter blocks the worker before each message, ahead of the Prepare step and of the transaction, for at
	// most half of ConsumerConfig.HandlerTimeout; see inbox.Blocking. If it fails, the message is postponed,
	// uncounted. Optional.
	Waiter inbox.Waiter
	// Timeout bounds the work on one delivery: the Prepare step and the transaction with its retries, not the
	// Waiter; in a batch, the Prepare step and each call of the handler. If it ends before the handler could
	// start, because there was no connection, the message is postponed, uncounted. Default:
	// ConsumerConfig.HandlerTimeout.
	Timeout time.Duration
	// Concurrency bounds how many messages of the name, or batches with some of them, run at once in a
	// consumer of this process, or in each of its partitions. It is for a handler with a scarce resource; the
	// other messages of the queue continue. Messages above the bound wait in the consumer, up to eight times
	// Prefetch, so that this process has them and other processes do not. If there are more, they are put off
	// if other names share the queue; otherwise nothing more is received. Default: no bound but
	// ConsumerConfig.Concurrency.
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

// Store is an inbox.Processor whose handlers run in a transaction together with the message's entry. It owns
// the tables of entries, of the ledger, of stopped ordering keys with their messages, and of pauses. Register
// all handlers first; after that it is safe for concurrent use.
type Store struct {
	transactor txretry.Transactor
	consumer   string
	cfg        Config
	mux        *inbox.Mux
	handled    map[string]bool // names with a handler
	count      counter

	entries driver.Entries
	ledger  inboxdriver.Ledger
	parks   *parks
	slots   slots
	slow    bool         // handlers may take long before their transactions
	passed  atomic.Int64 // transactions of messages that committed
	pausing pausing

	// nil if Config.Entries is set:
	pool   *pgxpool.Pool
	table  *table
	pruner *pgprune.Pruner
}

// New returns a Store without handlers. It does not access the database.
//
// The consumer is the name under which messages are processed: each consumer processes each message once. The
// name must never change while copies of processed messages may still arrive. 1 to 200 bytes.
//
// The Transactor runs the transactions. Its pool, for which *txretry.Manager has a method, is used for
// everything else. Only a Store with Config.Entries works without a pool.
func New(t txretry.Transactor, consumer string, cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	problems := []error{checkConsumer(consumer), cfg.validate()}
	if t == nil {
		problems = append(problems, errors.New("inboxpgx: Transactor is nil"))
	}
	count, err := newCounter(consumer, cfg.MeterProvider)
	s := &Store{transactor: t, consumer: consumer, cfg: cfg, mux: inbox.NewMux(), handled: map[string]bool{}, count: count, entries: cfg.Entries}
	problems = append(problems, err)
	if cfg.Entries == nil {
		problems = append(problems, s.useTables())
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	s.ledger, s.parks, s.slots = s.entries.Ledger(consumer), newParks(s.entries.Parking(consumer)), newSlots(cfg.ByName)
	s.slow = len(s.slots) > 0
	return s, nil
}

// Name returns the name of the consumer. Consumers of every transport use it as their default name.
func (s *Store) Name() string { return s.consumer }

// useTables keeps the entries in Postgres.
func (s *Store) useTables() error {
	var missing error
	if p, ok := s.transactor.(txdriver.Pooler); ok {
		s.pool = p.Pool()
	}
	if s.pool == nil && s.transactor != nil {
		missing = errors.New("inboxpgx: the Transactor has no pool; use inboxtest.New with a fake")
	}
	names, err := newTables(s.cfg.Schema, s.cfg.Table)
	if err := errors.Join(missing, err); err != nil {
		return err
	}
	if s.table, err = newTable(s.pool, names); err != nil {
		return err
	}
	s.entries = s.table
	s.pruner, err = newPruner(s.pool, names, s.consumer, s.cfg)
	return err
}

// Use adds middleware around every message, outside the transaction; see inbox.Mux.Use.
func (s *Store) Use(wrap ...inbox.Middleware) {
	s.slow = true
	s.mux.Use(wrap...)
}

// Fallback registers a handler, outside any transaction, for messages whose name has no handler; see
// inbox.Mux.Fallback.
func (s *Store) Fallback(h inbox.Handler) {
	s.slow = true
	s.mux.Fallback(h)
}

// SetDecode replaces inbox.DecodeJSON for all handlers; see inbox.Mux.SetDecode.
func (s *Store) SetDecode(decode func(m *inbox.Message, v any) error) { s.mux.SetDecode(decode) }

// Ledger implements driver.Deduplicator of inbox.
func (s *Store) Ledger() inboxdriver.Ledger { return s.ledger }

// Limit implements driver.Limiter of inbox, by Config.ByName.
func (s *Store) Limit(name string) int { return s.cfg.ByName[name].Concurrency }

// Configured implements driver.Configured of inbox. It returns an error for each name of Config.ByName
// without a handler.
func (s *Store) Configured() error {
	var problems []error
	for _, name := range s.unhandled() {
		problems = append(problems, fmt.Errorf("inboxpgx: Config.ByName names %q, which has no handler", name))
	}
	return errors.Join(problems...)
}

// unhandled returns the names of Config.ByName without a handler.
func (s *Store) unhandled() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(s.cfg.ByName)) {
		if !s.handled[name] {
			names = append(names, name)
		}
	}
	return names
}

// Retention implements driver.Deduplicator of inbox.
func (s *Store) Retention() time.Duration { return s.cfg.Retention }

//go:embed migrations/*.sql
var migrations embed.FS

// The names of the other tables start with the name of the table of entries.
const (
	attemptsSuffix = "_attempts" // the ledger
	stoppedSuffix  = "_stopped"  // stopped ordering keys
	waitingSuffix  = "_waiting"  // their messages
	pauseSuffix    = "_pause"    // paused consumers
)

// tables are the quoted names of a Store's tables.
type tables struct {
	schema, bare                               string // as configured
	entries, attempts, stopped, waiting, pause string // qualified and quoted
}

func newTables(schema, table string) (tables, error) {
	entries, err1 := sqlident.Qualify(schema, table)
	attempts, err2 := sqlident.Qualify(schema, table+attemptsSuffix)
	stopped, err3 := sqlident.Qualify(schema, table+stoppedSuffix)
	waiting, err4 := sqlident.Qualify(schema, table+waitingSuffix)
	pause, err5 := sqlident.Qualify(schema, table+pauseSuffix)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return tables{}, fmt.Errorf("inboxpgx: table name: %w", err)
	}
	return tables{schema, table, entries, attempts, stopped, waiting, pause}, nil
}

// missing explains the errors of a database without the tables.
func (t tables) missing() migrate.Missing {
	return migrate.Missing{Call: "Store.Migrate of inboxpgx", Tables: []string{t.entries, t.attempts, t.stopped, t.waiting, t.pause}}
}

func (t tables) set() (migrate.Set, error) {
	files, err := fs.Sub(migrations, "migrations")
	return migrate.Set{
		Component: "inbox", Files: files, Schema: t.schema,
		Names: map[string]string{
			"table": t.bare, "attempts": t.bare + attemptsSuffix, "stopped": t.bare + stoppedSuffix, "waiting": t.bare + waitingSuffix,
			"pause": t.bare + pauseSuffix,
		},
	}, err
}

// Migrate creates the tables or brings them up to date. Several processes may do so at once.
// With Config.Entries there is nothing to do.
func (s *Store) Migrate(ctx context.Context) error {
	if s.table == nil {
		return nil
	}
	set, err := s.table.names.set()
	if err != nil {
		return fmt.Errorf("inboxpgx: %w", err)
	}
	return migrate.Apply(ctx, s.pool, set)
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them, for a
// migration tool. No other package has the same numbers. Each file records that it was applied, so Migrate
// skips files applied by the tool. With Config.Entries there are no files.
func (s *Store) Schema() fs.FS {
	if s.table == nil {
		return embed.FS{}
	}
	return s.table.files
}

// Grants returns the minimal rights of a database role for one job, each as the text between GRANT and TO.
// The job "consume" is for a consumer, without the rights of its handlers; "operate" is for Check, Prune,
// Pause, and the dead letters of stopped keys. For another job it is nil, and with Config.Entries too.
func (s *Store) Grants(job string) []string {
	if s.table == nil {
		return nil
	}
	t := s.table.names
	noted := migrate.Grant(t.schema) // so that Migrate can see that there is nothing to do
	switch job {
	case "consume":
		return sqlident.Granted(t.schema, append(noted,
			`SELECT, INSERT (consumer, message_id), UPDATE (processed_at), DELETE ON `+t.entries,
			`SELECT, INSERT, UPDATE, DELETE ON `+t.attempts,
			`SELECT, INSERT (consumer, key), UPDATE (since, next_at), DELETE ON `+t.stopped,
			`SELECT, INSERT, UPDATE, DELETE ON `+t.waiting,
			`SELECT ON `+t.pause)...)
	case "operate":
		return sqlident.Granted(t.schema, append(noted,
			`SELECT, INSERT (consumer, message_id), UPDATE (processed_at), DELETE ON `+t.entries,
			`SELECT, UPDATE (name), DELETE ON `+t.attempts,
			`SELECT, UPDATE (next_at) ON `+t.stopped,
			`SELECT, UPDATE, DELETE ON `+t.waiting,
			`SELECT, INSERT (part, actor, reason), UPDATE (actor, reason), DELETE ON `+t.pause)...)
	}
	return nil
}

const scope = "github.com/holdfast-go/holdfast/inbox/inboxpgx"

// outcome is the outcome of a delivery, for the counter.
type outcome string

const (
	done      outcome = "done"
	duplicate outcome = "duplicate"
	parked    outcome = "parked" // its ordering key is stopped
	failed    outcome = "failed"
)

// counter counts deliveries by consumer, message name and outcome.
type counter struct {
	messages metric.Int64Counter
	consumer attribute.KeyValue
	options  *sync.Map // metric.MeasurementOption by counted: created once each
}

type counted struct {
	name string
	outcome
}

func newCounter(consumer string, provider metric.MeterProvider) (counter, error) {
	messages, err := telemetry.New(scope, nil, provider).Meter.Int64Counter("holdfast.inbox.messages",
		metric.WithDescription("Deliveries that reached a handler's transaction, by outcome."), metric.WithUnit("{message}"))
	if err != nil {
		return counter{}, fmt.Errorf("inboxpgx: counter: %w", err)
	}
	return counter{messages: messages, consumer: attribute.String("consumer", consumer), options: &sync.Map{}}, nil
}

// add counts one delivery. With an error it has failed. Only names with a handler are counted, so they are
// few.
func (c counter) add(ctx context.Context, name string, o outcome, err error) {
	if !c.messages.Enabled(ctx) {
		return
	}
	if err != nil {
		o = failed
	}
	c.messages.Add(ctx, 1, c.option(counted{name, o}))
}

func (c counter) option(of counted) metric.MeasurementOption {
	if known, ok := c.options.Load(of); ok {
		return known.(metric.MeasurementOption)
	}
	made := metric.WithAttributeSet(attribute.NewSet(c.consumer, attribute.String("name", of.name), attribute.String("outcome", string(of.outcome))))
	c.options.Store(of, made)
	return made
}

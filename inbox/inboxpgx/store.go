package inboxpgx

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// Store is an inbox.Processor whose handlers run in a transaction together with the message's
// entry. It owns the tables of entries, of the ledger, of stopped ordering keys with their messages, and of pauses. Register all handlers first; then it
// is safe for concurrent use.
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
	slow    bool         // handlers may take their time before their transactions
	passed  atomic.Int64 // transactions of messages that went through
	pausing pausing

	// nil where Config.Entries keeps the entries:
	pool   *pgxpool.Pool
	table  *table
	pruner *pgprune.Pruner
}

// New returns a Store without handlers. It does not look at the database.
//
// The consumer names who processes: each consumer processes each message once. The name must
// never change while copies of processed messages may still arrive. 1 to 200 bytes.
//
// The Transactor runs the transactions. Its pool, for which *txretry.Manager has a method, is
// used for everything else; only Config.Entries does without one.
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

// useTables keeps the entries in Postgres.
func (s *Store) useTables() error {
	var missing error
	if p, ok := s.transactor.(txdriver.Pooler); ok {
		s.pool = p.Pool()
	}
	if s.pool == nil && s.transactor != nil {
		missing = errors.New("inboxpgx: the Transactor has no pool; a fake one needs inboxtest.New")
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

// Fallback registers a handler, outside any transaction, for messages of names that have
// none; see inbox.Mux.Fallback.
func (s *Store) Fallback(h inbox.Handler) {
	s.slow = true
	s.mux.Fallback(h)
}

// Ledger implements driver.Deduplicator of inbox.
func (s *Store) Ledger() inboxdriver.Ledger { return s.ledger }

// Limit implements driver.Limiter of inbox, by Config.ByName.
func (s *Store) Limit(name string) int { return s.cfg.ByName[name].Concurrency }

// Configured implements driver.Configured of inbox: it names each name of Config.ByName that has no handler.
func (s *Store) Configured() error {
	var problems []error
	for _, name := range s.unhandled() {
		problems = append(problems, fmt.Errorf("inboxpgx: Config.ByName names %q, which has no handler", name))
	}
	return errors.Join(problems...)
}

// unhandled are the names of Config.ByName that have no handler.
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

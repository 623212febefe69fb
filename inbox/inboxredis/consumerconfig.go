package inboxredis

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const component = "inboxredis"

// Config configures a Consumer. The zero value works.
type Config struct {
	inbox.ConsumerConfig

	// Group is the consumer group. Each group of a stream gets all its messages, and shares them
	// among its consumers. Default: ConsumerConfig.Name, which is the stream's name by default.
	Group string
	// KeepProcessed leaves entries in the stream that all its groups have processed, for readers
	// without a group; somebody else must trim the stream then.
	KeepProcessed bool
	// Timeout bounds every call to Redis; a read that waits for messages gets a second more. A client
	// without the option ContextTimeoutEnabled is left behind then, and ends by its own timeouts.
	// Default: 5 s.
	Timeout time.Duration
}

// settings are a Config with its defaults. The engine checks what is its own.
type settings struct {
	Config
	keys         keys
	log          *slog.Logger
	maxBodyBytes int // 0: the engine's own

	remembers bool          // the processor remembers what it has processed,
	retention time.Duration // and for how long
	ledger    bool          // it notes attempts
}

func newSettings(stream string, p inbox.Processor, cfg Config) (*settings, error) {
	cfg.ConsumerConfig = driver.ConsumerDefaults(cfg.ConsumerConfig, stream)
	cfg.Group = cmp.Or(cfg.Group, cfg.Name)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.Logger = cfg.Logger.With(slog.String("group", cfg.Group))
	s := &settings{
		Config: cfg, retention: driver.DefaultRetention,
		log: cfg.Logger.With(slog.String("component", component), slog.String("queue", stream)),
	}
	if d, ok := p.(driver.Deduplicator); ok {
		s.remembers, s.retention, s.ledger = true, d.Retention(), d.Ledger() != nil
	}
	var problems []error
	keys, err := newKeys(stream, cfg.Group)
	if err != nil {
		problems = append(problems, fmt.Errorf("inboxredis: %w", err))
	}
	s.keys = keys
	return s, errors.Join(problems...)
}

// place is the class whose dead letters those of a class are with: its own or the default.
func (s *settings) place(class string) string {
	if slices.Contains(driver.AllClasses(s.Classes), class) {
		return class
	}
	return driver.ClassDefault
}

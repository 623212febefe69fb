package inboxredis

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
)

var ErrInProgress = errInProgress

// SetTimeout sets how long the shortcut waits for Redis.
func (p *Processor) SetTimeout(d time.Duration) { p.shortcut.timeout = d }

// Config is the whole configuration of a consumer, flat for tests. Group is the consumer's name.
type Config struct {
	inbox.ConsumerConfig
	Group         string
	Format        format.Format
	Partitions    int
	KeepProcessed bool
	Timeout       time.Duration
}

// Of returns the configuration in the form of NewConsumer.
func (c Config) Of(stream string) (Stream, inbox.ConsumerConfig) {
	c.ConsumerConfig.Name = cmp.Or(c.Group, c.Name)
	return Stream{Name: stream, Format: c.Format, Partitions: c.Partitions, KeepProcessed: c.KeepProcessed, Timeout: c.Timeout}, c.ConsumerConfig
}

func (c Config) settings(stream string, p inbox.Processor) (*settings, error) {
	from, cfg := c.Of(stream)
	return newSettings(from, p, cfg)
}

// NewSources returns the sources of all partitions, and their dead letters.
func NewSources(client redis.UniversalClient, stream string, cfg Config) (all []driver.Source, of driver.DeadLetters, err error) {
	s, err := cfg.settings(stream, inbox.NewMux())
	var letters []driver.DeadLetters
	for _, g := range newGroups(client, s) {
		one := newSource(g, newRun())
		all, letters = append(all, one), append(letters, one.DeadLetters())
	}
	return all, driver.JoinDeadLetters(letters...), err
}

// Setup creates everything that a consumer needs.
func Setup(ctx context.Context, client redis.UniversalClient, stream string, cfg Config) error {
	s, err := cfg.settings(stream, inbox.NewMux())
	if err != nil {
		return err
	}
	for _, g := range newGroups(client, s) {
		if err := g.setup(ctx); err != nil {
			return err
		}
	}
	return nil
}

// NewTuned is NewConsumer with a largest body and an interval for comparing shares; 0 is the default of each.
func NewTuned(client redis.UniversalClient, stream string, p inbox.Processor, cfg Config, maxBodyBytes int, leveling time.Duration) (*Consumer, error) {
	s, err := cfg.settings(stream, p)
	if err != nil {
		return nil, err
	}
	s.maxBodyBytes, s.leveling = maxBodyBytes, leveling
	return newConsumer(client, s, p)
}

// Keys returns all keys of a group.
func Keys(stream, group string) ([]string, error) {
	k, err := newKeys(stream, group)
	return append(k.read(), k.later(), k.putOff(), k.probe(), k.dead("", driver.ClassDefault)), err
}

// Trim trims the streams of a source.
func Trim(ctx context.Context, s driver.Source) error { return s.(*source).chores.trim(ctx) }

// Forget removes the names of consumers that were idle longer than this.
func Forget(ctx context.Context, s driver.Source, idle time.Duration) error {
	return s.(*source).chores.forgetIdle(ctx, idle)
}

// Groups of streams with similar names share no keys.
func TestKeys_differBetweenGroups(t *testing.T) {
	t.Parallel()
	owners := map[string][2]string{}
	for _, stream := range []string{"orders", "{orders}", "orders:a", "{orders}:a", "{orders}:", "{orders}a", "o{rders}"} {
		for _, group := range []string{"g", "a:g", ":g", "a", "a%3Ag", "a:b:g", "orders:g"} {
			k, err := newKeys(stream, group)
			if err != nil {
				t.Fatal(err)
			}
			if other, taken := owners[k.later()]; taken {
				t.Errorf("%s of %s and %s of %s share %s", group, stream, other[1], other[0], k.later())
			}
			owners[k.later()] = [2]string{stream, group}
		}
	}
}

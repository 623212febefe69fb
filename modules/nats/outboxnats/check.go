package outboxnats

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// minDuplicates is the shortest useful duplicate window of a stream: a dead relay is replaced within it.
const minDuplicates = time.Minute

// Ready returns nil if JetStream answers within Config.Timeout.
func (p *Publisher) Ready(ctx context.Context) error {
	if !p.conn.IsConnected() {
		return fmt.Errorf("outboxnats: ready: %w", nats.ErrDisconnected)
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Timeout)
	defer cancel()
	if _, err := p.js.AccountInfo(ctx); err != nil {
		return fmt.Errorf("outboxnats: ready: %w", err)
	}
	return nil
}

// Check checks that a stream takes the subjects of Config.Topic, Config.Routes and Config.Partitions, that it drops
// second copies, keeps messages on disk and has a consumer if it needs one, and that the connection reconnects forever. It returns nil if it finds
// nothing. Otherwise the error joins the findings, each with a method Fix() string, and the errors of checks that
// failed.
func (p *Publisher) Check(ctx context.Context) error {
	found := check.Findings{Component: "outboxnats"}
	if p.conn.Opts.MaxReconnect >= 0 {
		found.Add("set nats.MaxReconnects(-1)", "the connection gives up after %d attempts to reconnect", p.conn.Opts.MaxReconnect)
	}
	for _, subject := range p.subjects() {
		if err := p.checkSubject(ctx, subject, &found); err != nil {
			found.Join(fmt.Errorf("outboxnats: check: subject %q: %w", subject, err))
			break
		}
	}
	return found.Err()
}

func (p *Publisher) checkSubject(ctx context.Context, subject string, found *check.Findings) error {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Timeout)
	defer cancel()
	name, err := p.js.StreamNameBySubject(ctx, subject)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		found.Add("create a stream for it, or call inboxnats.Consumer.Setup", "no stream takes subject %q", subject)
		return nil
	}
	if err != nil {
		return err
	}
	stream, err := p.js.Stream(ctx, name)
	if err != nil {
		return err
	}
	cfg := stream.CachedInfo().Config
	wanted := minDuplicates
	if cfg.MaxAge > 0 { // the window cannot be longer
		wanted = min(wanted, cfg.MaxAge)
	}
	if cfg.Duplicates < wanted {
		found.Add("set duplicate_window to 2m", "stream %q drops second copies for %v only", name, cfg.Duplicates)
	}
	if cfg.Storage == jetstream.MemoryStorage {
		found.Add("create it with storage file", "stream %q loses its messages when the server ends", name)
	}
	if cfg.Retention == jetstream.InterestPolicy && stream.CachedInfo().State.Consumers == 0 {
		found.Add("create a durable consumer, or call inboxnats.Consumer.Setup", "stream %q confirms messages and deletes them: it has no consumer", name)
	}
	return nil
}

// subjects returns the subjects that are known before the first message.
func (p *Publisher) subjects() (all []string) {
	topics := []string{p.cfg.Topic}
	for _, name := range slices.Sorted(maps.Keys(p.cfg.Routes)) {
		route := p.rules.Route(driver.Message{Name: name})
		if p.cfg.Partitions[route.Exchange] > 1 {
			topics = append(topics, route.Exchange)
		} else {
			all = append(all, route.Exchange+"."+route.RoutingKey)
		}
	}
	topics = slices.AppendSeq(topics, maps.Keys(p.cfg.Partitions))
	slices.Sort(topics)
	for _, topic := range slices.Compact(topics) {
		for _, name := range partition.Names(topic, p.cfg.Partitions[topic]) {
			all = append(all, name+".>")
		}
	}
	return all
}

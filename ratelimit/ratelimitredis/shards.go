package ratelimitredis

import (
	"context"
	"fmt"
	"hash/fnv"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/lanes"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// failuresInARow open the breaker.
const failuresInARow = 5

// shard is what belongs to one hash tag, and so to one node: a node that does not
// answer holds up no other, and has a clock of its own.
type shard struct {
	base    string // of the keys
	sender  *sender
	lanes   *lanes.Lanes[*call]
	breaker *breaker.Breaker
	denials *ratelimit.DenyCache // nil for none
}

func newShard(base string, client redis.UniversalClient, cfg Config, m *meters) *shard {
	s := &shard{
		base:    base,
		sender:  &sender{client: client, drifted: func(ctx context.Context) { m.drift.Add(ctx, 1) }},
		breaker: breaker.New(failuresInARow, cfg.ProbeEvery),
	}
	// A server that does not answer holds a few goroutines, not one per caller, and
	// nobody longer than they want to: only a client that heeds deadlines lets go of
	// a caller in time.
	heedsDeadlines, _ := redisconn.Timeouts(client)
	s.lanes = &lanes.Lanes[*call]{Send: s.sender.send, Most: cfg.Pipelines, Timeout: cfg.Timeout, OwnTrips: heedsDeadlines}
	if cfg.DenyCache > 0 {
		s.denials = ratelimit.NewDenyCache(cfg.DenyCache / max(1, cfg.Shards))
	}
	return s
}

// shard returns the one that the key of the charges chooses.
func (l *Limiter) shard(charges []ratelimit.Charge) (*shard, error) {
	if l.cfg.Shards < 2 {
		return l.shards[0], nil
	}
	key, err := routingKey(charges)
	if err != nil {
		return nil, err
	}
	return l.shards[l.shardOf(key)], nil
}

// shardOf must not change: it is where counters are.
func (l *Limiter) shardOf(key string) int {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // never fails
	return int(h.Sum64() % uint64(l.cfg.Shards))
}

// bases are how the keys begin, by shard.
func bases(cfg Config) []string {
	prefix := cfg.Prefix + ":"
	if cfg.Tag == "" {
		return []string{prefix}
	}
	if cfg.Shards < 2 {
		return []string{prefix + "{" + cfg.Tag + "}:"}
	}
	all := make([]string, cfg.Shards)
	for i := range all {
		all[i] = prefix + "{" + cfg.Tag + strconv.Itoa(i) + "}:"
	}
	return all
}

// routingKey is the key that all the charges with a key share.
func routingKey(charges []ratelimit.Charge) (string, error) {
	key := ""
	for _, c := range charges {
		switch {
		case c.Key == "":
		case key == "":
			key = c.Key
		case key != c.Key:
			return "", fmt.Errorf("%w: with Shards all keys of a decision must be the same one: others would be counted in several shards", ratelimit.ErrInvalid)
		}
	}
	if key == "" {
		return "", fmt.Errorf("%w: with Shards a decision needs a key, which chooses the shard", ratelimit.ErrInvalid)
	}
	return key, nil
}

// share gives the limits without a key the part that the decision's shard has of
// them. The parts of all shards add up to the limit.
func (l *Limiter) share(charges []ratelimit.Charge) error {
	if l.cfg.Shards < 2 {
		return nil
	}
	key, err := routingKey(charges)
	if err != nil {
		return err
	}
	shard, shards := int64(l.shardOf(key)), int64(l.cfg.Shards)
	for i := range charges {
		limit := &charges[i].Limit
		if charges[i].Key != "" {
			continue
		}
		if limit.Algorithm == ratelimit.TokenBucket {
			return fmt.Errorf("%w: limit %q is a token bucket without a key, which Shards cannot divide", ratelimit.ErrInvalid, limit.Name)
		}
		if limit.Max < shards {
			return fmt.Errorf("%w: limit %q: Max is %d, less than the %d Shards", ratelimit.ErrInvalid, limit.Name, limit.Max, shards)
		}
		part := limit.Max / shards
		if shard < limit.Max%shards {
			part++
		}
		limit.Max = part
	}
	return nil
}

// Validate reports, wrapping ratelimit.ErrInvalid, why charges like these cannot
// be decided together on this limiter. NewWaiter calls it, and so can a program
// at its start. Nothing is charged.
func (l *Limiter) Validate(charges ...ratelimit.Charge) error {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return err
	}
	return l.share(charges)
}

package idempotencyredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// mostSeen is how many keys of a node InFlight goes through at most, and seenPerTrip at a time.
	mostSeen    = 100_000
	seenPerTrip = 1000
	// seeing is for how long it does, no longer than half of what it has: the rest is left for slow answers.
	seeing = time.Second
)

// InFlight returns how many claims are held now, those of other systems included. Redis has no list of them, so that it
// goes through the keys of the database: 100,000 of each node at most, for a second at most. Where there are more, the
// number is not exact but an estimate from those: near the truth where many claims are held, and maybe 0 where few are.
// It is up to 100 SCANs of 1,000 keys: count seldom. It needs the right to SCAN and DBSIZE. With Config.HashTag and a client
// that is neither *redis.ClusterClient nor *redis.Ring the error is errors.ErrUnsupported: the nodes are not known.
func (s *Store) InFlight(ctx context.Context) (n int, exact bool, err error) {
	if s.cfg.HashTag && !sharded(s.client) {
		return 0, false, fmt.Errorf("idempotencyredis: in flight: %w: the nodes behind a %T cannot be listed", errors.ErrUnsupported, s.client)
	}
	var found locks
	err = s.server.Ask(ctx, s.lanes != nil, func(ctx context.Context) (err error) {
		found, err = within(ctx, func(ctx context.Context) (locks, error) { return s.inFlight(ctx, mostSeen, seeing) })
		return err
	})
	if err != nil {
		return 0, false, fmt.Errorf("idempotencyredis: in flight: %w", err)
	}
	return found.count, !found.estimated, nil
}

// locks are how many there are.
type locks struct {
	count     int
	estimated bool
}

// inFlight counts the locks in at most so many keys of each node, for at most so long.
func (s *Store) inFlight(ctx context.Context, most int, bound time.Duration) (locks, error) {
	var total atomic.Int64
	var estimated atomic.Bool
	count := func(ctx context.Context, node *redis.Client) error {
		found, err := s.locksOf(ctx, node, most, bound)
		total.Add(int64(found.count))
		if found.estimated {
			estimated.Store(true)
		}
		return err
	}
	var err error
	switch client := s.client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, count)
	case *redis.Ring:
		err = client.ForEachShard(ctx, count)
	default:
		return s.locksOf(ctx, client, most, bound)
	}
	return locks{int(total.Load()), estimated.Load()}, err
}

// globs escapes what has a meaning in a pattern.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// locksOf counts the locks of a node. Keys come in the order of their hashes, which is none: some are a fair sample of all.
func (s *Store) locksOf(ctx context.Context, node redis.Cmdable, most int, bound time.Duration) (locks, error) {
	pattern := globs.Replace(s.cfg.Prefix) + ":lock:*"
	found := map[string]bool{} // a scan may tell a key twice
	if end, ok := ctx.Deadline(); ok {
		bound = min(bound, time.Until(end)/2)
	}
	began, cursor, seen := time.Now(), uint64(0), 0
	for seen < most && (seen == 0 || time.Since(began) < bound) {
		names, next, err := node.Scan(ctx, cursor, pattern, seenPerTrip).Result()
		if err != nil {
			return locks{}, err
		}
		for _, name := range names {
			found[name] = true
		}
		if next == 0 {
			return locks{count: len(found)}, nil
		}
		cursor, seen = next, seen+seenPerTrip
	}
	keys, err := node.DBSize(ctx).Result()
	if err != nil {
		return locks{}, err
	}
	return locks{int(int64(len(found)) * max(keys, int64(seen)) / int64(seen)), true}, nil
}

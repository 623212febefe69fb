package idempotencyredis_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// A slot that moves to another node while a run ends does not cost its result:
// as long as one of the two keys is there and the other one is not, no script can
// run on them.
func TestSlotMovesDuringARun(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	s := newStore(t, client, idempotencyredis.Config{})
	moved := make(chan error, 1)
	got, _, err := idempotency.Do(t.Context(), s, key, fp, func(ctx context.Context) (int, error) {
		m, err := newMove(ctx, client, servers[0].URL(), servers[1].URL())
		if err != nil {
			return 0, err
		}
		time.AfterFunc(300*time.Millisecond, func() { moved <- m.end(t.Context()) })
		return 7, nil
	})
	if err := errors.Join(err, <-moved); err != nil || got != 7 {
		t.Fatalf("Do = %d, %v", got, err)
	}
	got, replayed, err := idempotency.Do(t.Context(), s, key, fp, func(context.Context) (int, error) { return 8, nil })
	if err != nil || !replayed || got != 7 {
		t.Errorf("again: %d, %v, %v", got, replayed, err)
	}
}

// move takes the slot of key from one node to another, as redis-cli --cluster
// reshard does.
type move struct {
	from, to *redis.Client
	toID     string
	slot     int64
}

// newMove begins it.
func newMove(ctx context.Context, client *redis.ClusterClient, urls ...string) (*move, error) {
	slot, err1 := client.ClusterKeySlot(ctx, "{"+string(key)+"}").Result()
	from, err2 := client.MasterForKey(ctx, "{"+string(key)+"}")
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	m := &move{from: from, slot: slot}
	for _, url := range urls {
		if opts, err := redis.ParseURL(url); err == nil && opts.Addr != from.Options().Addr {
			m.to = redis.NewClient(opts)
		}
	}
	fromID, err1 := m.from.Do(ctx, "CLUSTER", "MYID").Text()
	toID, err2 := m.to.Do(ctx, "CLUSTER", "MYID").Text()
	m.toID = toID
	return m, errors.Join(err1, err2,
		m.to.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err(),
		m.from.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
}

// end takes the keys along.
func (m *move) end(ctx context.Context) error {
	defer func() { _ = m.to.Close() }()
	keys, err := m.from.ClusterGetKeysInSlot(ctx, int(m.slot), 100).Result()
	if err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(m.to.Options().Addr)
	for _, k := range keys {
		err = errors.Join(err, m.from.Migrate(ctx, host, port, k, 0, 5*time.Second).Err())
	}
	for _, node := range []*redis.Client{m.to, m.from} {
		err = errors.Join(err, node.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "NODE", m.toID).Err())
	}
	return err
}

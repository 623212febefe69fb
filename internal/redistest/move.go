package redistest

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Move takes the slot of a key from one node of a Cluster to another, as redis-cli --cluster
// reshard does: first Begin, then Keys, then End.
type Move struct {
	from, to     *redis.Client
	fromID, toID string
	slot         int64
}

// NewMove prepares it.
func NewMove(t testing.TB, client *redis.ClusterClient, servers []*testenv.Server, key string) *Move {
	t.Helper()
	slot, err1 := client.ClusterKeySlot(t.Context(), key).Result()
	from, err2 := client.MasterForKey(t.Context(), key)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatalf("redistest: move: %v", err)
	}
	m := &Move{from: from, slot: slot}
	for _, s := range servers {
		if c := Client(t, s.URL()); c.Options().Addr != from.Options().Addr {
			m.to = c
		}
	}
	m.fromID, err1 = m.from.Do(t.Context(), "CLUSTER", "MYID").Text()
	m.toID, err2 = m.to.Do(t.Context(), "CLUSTER", "MYID").Text()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatalf("redistest: move: %v", err)
	}
	return m
}

// Begin makes both nodes answer for the slot: the old one for the keys that it has.
func (m *Move) Begin(ctx context.Context) error {
	return errors.Join(
		m.to.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.fromID).Err(),
		m.from.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.toID).Err())
}

// Keys takes the keys along.
func (m *Move) Keys(ctx context.Context) error {
	host, port, err := net.SplitHostPort(m.to.Options().Addr)
	for err == nil {
		keys, failed := m.from.ClusterGetKeysInSlot(ctx, int(m.slot), 100).Result()
		if len(keys) == 0 {
			return failed
		}
		for _, k := range keys {
			err = errors.Join(err, m.from.Migrate(ctx, host, port, k, 0, 5*time.Second).Err())
		}
	}
	return err
}

// End gives the slot to the new node.
func (m *Move) End(ctx context.Context) error {
	var errs []error
	for _, node := range []*redis.Client{m.to, m.from} {
		errs = append(errs, node.Do(ctx, "CLUSTER", "SETSLOT", m.slot, "NODE", m.toID).Err())
	}
	return errors.Join(errs...)
}

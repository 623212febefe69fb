package outboxpgx_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// meter counts what a pool sends.
type meter struct {
	mu         sync.Mutex
	trips      int
	statements []string // without those that begin and end transactions
}

func (m *meter) note(trips int, sql string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.trips += trips
	if sql != "" && !strings.HasPrefix(sql, "BEGIN") && !strings.HasPrefix(sql, "COMMIT") {
		m.statements = append(m.statements, sql)
	}
}

// take returns what was counted since the last take.
func (m *meter) take() (trips int, statements []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	trips, statements = m.trips, m.statements
	m.trips, m.statements = 0, nil
	return trips, statements
}

func (m *meter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	m.note(1, d.SQL)
	return ctx
}
func (m *meter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (m *meter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	m.note(1, "")
	return ctx
}
func (m *meter) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	m.note(0, d.SQL)
}
func (m *meter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// metered is a pool of its own on the server of another, and its meter.
func metered(t *testing.T, pool *pgxpool.Pool) (*pgxpool.Pool, *meter) {
	t.Helper()
	cfg, m := pool.Config(), &meter{}
	cfg.ConnConfig.Tracer = m
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	return pool, m
}

// A message that comes alone costs a relay two round trips and four statements: claim and read, settle and look.
func TestStatementsOfAMessage(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	pool, m := metered(t, f.pool)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet, PollOnly: true, PruneInterval: -1})
	must(t, err)
	relay, err := outbox.NewRelay(store, outboxtest.NewPublisher(), outbox.RelayConfig{Logger: quiet})
	must(t, err)
	defer run(t, relay)()
	const messages = 50
	var trips, statements []int
	for range messages {
		f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
		m.take()
		store.Wake()
		testenv.Eventually(t, func() error { return settled(t, f, m) })
		n, sql := m.take()
		trips, statements = append(trips, n), append(statements, len(sql))
	}
	slices.Sort(trips)
	slices.Sort(statements)
	t.Logf("trips %v, statements %v", trips, statements)
	if trips[messages/2] != 2 || statements[messages/2] != 4 {
		t.Errorf("%d round trips and %d statements a message, want 2 and 4", trips[messages/2], statements[messages/2])
	}
}

// settled is an error while a lane is leased or a message is there.
func settled(t *testing.T, f *fixture, _ *meter) error {
	t.Helper()
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Ready > 0 || stats.Leased > 0 {
		return errors.New("the message is not settled")
	}
	return nil
}

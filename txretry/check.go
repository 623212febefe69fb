package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

const (
	// minVersion is the first one with pg_current_xact_id.
	minVersion = 13

	// minPredLocks is enough for 25 predicate locks a transaction. Postgres keeps the locks of up to
	// ten committed transactions per connection while one that overlaps with them is open.
	minPredLocks = 256

	checkTimeout = 5 * time.Second
)

// Check looks for what keeps transactions from working: a server that is too old,
// read only, or has a small table of predicate locks; a pool that is larger than
// the server allows, or does not bound its own waits (see [PreparePool]). nil means
// that all is well. Else the error joins the findings, each of which has a method
// Mend() string that says how to put it right; an error without it says why Check
// could not look. A manager that was not made by [New], on a fake or over database/sql, is not
// looked at: nil.
func (m *Manager) Check(ctx context.Context) error {
	source, ok := m.source.(poolSource)
	if !ok {
		return nil
	}
	limits := driver.Limits{Acquire: m.bounds.acquire, Begin: m.bounds.begin}
	facts, err := source.facts(ctx, limits)
	if errors.Is(err, driver.ErrSilent) { // it only reads, and another connection may answer
		limits.Acquire = checkTimeout
		if again, err2 := source.facts(ctx, limits); err2 == nil {
			facts, err = again, nil
		}
	}
	if err != nil {
		return fmt.Errorf("txretry: check: %w", err)
	}
	found := check.Findings{Component: "txretry"}
	m.checkServer(facts, &found)
	checkPool(source.pool.Config(), facts, &found)
	return found.Err()
}

func (m *Manager) checkServer(facts serverFacts, found *check.Findings) {
	if facts.Version < minVersion {
		found.Add(fmt.Sprintf("upgrade to Postgres %d or newer", minVersion), "Postgres %d is too old", facts.Version)
	}
	if facts.Standby {
		found.Add("connect to the primary, for example with target_session_attrs=primary", "the server is a hot standby")
	} else if facts.ReadOnly {
		found.Add("reset default_transaction_read_only of the server, the database or the role",
			"default_transaction_read_only is on, so that no transaction can write")
	}
	if m.cfg.Isolation == pgx.Serializable && facts.PredLocks < minPredLocks {
		found.Add(fmt.Sprintf("ALTER SYSTEM SET max_pred_locks_per_transaction = %d, then restart the server", minPredLocks),
			"max_pred_locks_per_transaction is %d: SERIALIZABLE transactions fail with 53200 when one of them is open for long and they take more than %d locks each",
			facts.PredLocks, facts.PredLocks/10)
	}
}

func checkPool(pool *pgxpool.Config, facts serverFacts, found *check.Findings) {
	if int(pool.MaxConns) > facts.Connections {
		found.Add("lower the pool's MaxConns, or raise max_connections",
			"the pool may open %d connections, the server allows %d", pool.MaxConns, facts.Connections)
	}
	if pool.ConnConfig.ConnectTimeout == 0 || pool.PingTimeout == 0 || pool.BeforeClose == nil {
		found.Add("call txretry.PreparePool on the pool's Config",
			"the pool does not bound how long it connects, pings and closes, so that it may need a minute to get over connections that were cut off")
	}
}

// serverFacts is what Check asks.
type serverFacts struct {
	Version, PredLocks, Connections int
	Standby, ReadOnly               bool
}

func (p poolSource) facts(ctx context.Context, limits driver.Limits) (f serverFacts, err error) {
	conn, err := p.acquire(ctx, limits)
	if err != nil {
		return f, err
	}
	g := guard{conn: conn.Conn()}
	defer func() { p.put(conn, g.silent) }()
	g.expect(checkTimeout)
	err = g.conn.QueryRow(ctx, `select current_setting('server_version_num')::int / 10000,
		current_setting('max_pred_locks_per_transaction')::int,
		current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
		pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool`,
		pgx.QueryExecModeExec).Scan(&f.Version, &f.PredLocks, &f.Connections, &f.Standby, &f.ReadOnly)
	return f, g.answered(ctx, err)
}

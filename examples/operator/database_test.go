package operator_test

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// database has the tables of all packages in a schema, and holds of a shop.
type database struct {
	schema, url string
	owner       *pgxpool.Pool
}

func newDatabase(t *testing.T) *database {
	t.Helper()
	pool, schema := pgtest.NewSchema(t)
	d := &database{schema, pool.Config().ConnString(), pool}
	as := d.as(t, pool)
	for _, migrate := range []func(context.Context) error{as.outbox.Migrate, as.inbox.Migrate, as.keys.Migrate, as.log.Migrate} {
		check(t, migrate(t.Context()))
	}
	d.exec(t, `CREATE TABLE holds (id bigint PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL, customer text);
		CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'; INSERT INTO holds VALUES (1, 'held', now() - interval '1 hour', 'ada')`)
	return d
}

func (d *database) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := d.owner.Exec(t.Context(), sql)
	check(t, err)
}

// parts are the packages on one role's connections.
type parts struct {
	pool    *pgxpool.Pool
	manager *txretry.Manager
	outbox  *outboxpgx.Store
	inbox   *inboxpgx.Store
	keys    *idempotencypgx.Store
	holds   *expirypgx.Store
	log     *operator.PostgresLog
}

func (d *database) as(t *testing.T, pool *pgxpool.Pool) parts {
	t.Helper()
	manager := must(txretry.New(pool, txretry.Config{}))(t)
	return parts{
		pool: pool, manager: manager,
		outbox: must(outboxpgx.New(pool, outboxpgx.Config{Schema: d.schema, Logger: quiet}))(t),
		inbox:  must(inboxpgx.New(manager, "billing", inboxpgx.Config{Schema: d.schema, Logger: quiet}))(t),
		keys:   must(idempotencypgx.New(manager, idempotencypgx.Config{Schema: d.schema, Lease: time.Minute, Logger: quiet}))(t),
		holds:  must(expirypgx.New(manager, "holds", expirypgx.Config{Schema: d.schema}))(t),
		log:    must(operator.NewPostgresLog(pool))(t),
	}
}

func (p parts) operator(t *testing.T, relay *outbox.Relay) *rig {
	t.Helper()
	consumer := must(inboxtest.NewConsumer(inboxtest.NewBroker(), "billing", p.inbox, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true, Logger: quiet}}))(t)
	return &rig{Operator: must(operator.New(operator.Config{
		Outboxes:  []operator.Outbox{{Store: p.outbox, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: p.inbox}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: p.holds}},
		Parts:     []operator.Part{{Name: "idempotency", Part: p.keys}},
		Log:       p.log,
	}))(t)}
}

// role makes a role that may do what is printed for the job, and returns the packages on its connections.
func (d *database) role(t *testing.T, job string) parts {
	t.Helper()
	name := "Holdfast " + job + " " + rand.Text()[:8]
	quoted := pgx.Identifier{name}.Sanitize()
	d.exec(t, "CREATE ROLE "+quoted)
	t.Cleanup(func() {
		_, err := d.owner.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+quoted+"; DROP ROLE "+quoted)
		if err != nil {
			t.Error(err)
		}
	})
	owner := d.as(t, d.owner).operator(t, nil)
	d.exec(t, owner.wants(t, 0, []string{"schema", "grants", "--job=" + job, "--to=" + name}, "USAGE ON SCHEMA"))
	cfg := must(pgxpool.ParseConfig(d.url))(t)
	cfg.MaxConns, cfg.ConnConfig.RuntimeParams["role"] = 6, name
	pool := must(pgxpool.NewWithConfig(t.Context(), cfg))(t)
	t.Cleanup(pool.Close)
	var user string
	check(t, pool.QueryRow(t.Context(), "SELECT current_user").Scan(&user))
	if user != name {
		t.Fatalf("the connections are of %q", user)
	}
	return d.as(t, pool)
}

// refused wants the role to be refused each statement, and to be let do none of it.
func (p parts) refused(t *testing.T, statements ...string) {
	t.Helper()
	const insufficientPrivilege = "42501"
	for _, table := range []string{"outbox", "outbox_lanes", "outbox_dead", "outbox_audit", "outbox_pause", "outbox_dedup", "inbox", "inbox_attempts", "inbox_parked", "inbox_pause", "idempotency", "operator_log"} {
		statements = append(statements, "TRUNCATE holdfast_"+table, "DROP TABLE holdfast_"+table, "ALTER TABLE holdfast_"+table+" ADD x int")
	}
	statements = append(statements, "TRUNCATE holds", "DELETE FROM holds", "INSERT INTO holds VALUES (2, 'held', now())", "SELECT customer FROM holds", "CREATE TABLE mine (n int)")
	for _, sql := range statements {
		_, err := p.pool.Exec(t.Context(), sql)
		if answer, ok := errors.AsType[*pgconn.PgError](err); !ok || answer.Code != insufficientPrivilege {
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
}

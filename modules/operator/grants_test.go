package operator_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// Statements on the tables of each package that only the package's own jobs may run.
var (
	onOutbox = []string{
		"SELECT body FROM holdfast_outbox", "UPDATE holdfast_outbox SET due_at = now()", "DELETE FROM holdfast_outbox", "SELECT FROM holdfast_outbox_lanes FOR UPDATE",
		"SELECT body FROM holdfast_outbox_dead", "DELETE FROM holdfast_outbox_dead", "SELECT actor FROM holdfast_outbox_audit", "DELETE FROM holdfast_outbox_audit", "DELETE FROM holdfast_outbox_dedup",
		"DELETE FROM holdfast_outbox_pause", "INSERT INTO holdfast_outbox_pause (part, actor, reason) VALUES ('', '', '')",
	}
	toOutbox = []string{
		"INSERT INTO holdfast_outbox (id, lane, name, body, content_type) VALUES (gen_random_uuid(), 0, 'a', '', '')", "INSERT INTO holdfast_outbox_dedup VALUES ('a', gen_random_uuid(), now())",
	}
	onInbox = []string{
		"SELECT FROM holdfast_inbox", "INSERT INTO holdfast_inbox (consumer, message_id) VALUES ('a', gen_random_uuid())", "DELETE FROM holdfast_inbox",
		"SELECT FROM holdfast_inbox_attempts", "SELECT body FROM holdfast_inbox_waiting", "DELETE FROM holdfast_inbox_waiting", "SELECT FROM holdfast_inbox_stopped", "DELETE FROM holdfast_inbox_stopped",
		"DELETE FROM holdfast_inbox_pause", "INSERT INTO holdfast_inbox_pause (part, actor, reason) VALUES ('billing', '', '')",
	}
	onKeys = []string{
		"SELECT body FROM holdfast_idempotency", "DELETE FROM holdfast_idempotency", "UPDATE holdfast_idempotency SET body = ''",
		"INSERT INTO holdfast_idempotency (key, fingerprint, fingerprint_version, status, token, expires_at) VALUES ('a', '', 0, 'completed', '', now())",
	}
	onLog   = []string{"SELECT FROM holdfast_operator_log", "DELETE FROM holdfast_operator_log", "INSERT INTO holdfast_operator_log (what, part, chosen, actor, reason) VALUES ('', '', '', '', '')"}
	onHolds = []string{"UPDATE holds SET status = 'expired'", "SELECT id FROM holds"}
)

func allOf(lists ...[]string) (all []string) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}

func (p parts) write(t *testing.T, names ...string) {
	t.Helper()
	check(t, p.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		for _, name := range names {
			m, err := outbox.NewMessage(name, map[string]string{})
			if err != nil {
				return err
			}
			m.Key = "one key"
			if err := p.outbox.Write(ctx, tx, m); err != nil {
				return err
			}
		}
		return nil
	}))
}

func TestGrantsWrite(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	p := d.role(t, "write")
	p.write(t, "order.placed", "order.paid")
	for _, want := range []bool{true, false} {
		check(t, p.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			m, err := outbox.NewMessage("order.once", map[string]string{})
			if err != nil {
				return err
			}
			if _, first, err := p.outbox.WriteOnce(ctx, tx, "a key", m); err != nil || first != want {
				return fmt.Errorf("first is %v: %w", first, err)
			}
			_, err = tx.Exec(ctx, "SELECT holdfast_outbox_write('order.told', '{}')")
			return err
		}))
	}
	depth := must(d.as(t, d.owner).outbox.Depth(t.Context()))(t)
	if depth.Ready != 5 {
		t.Errorf("%+v, want 5 messages", depth)
	}
	p.refused(t, allOf(onOutbox, onInbox, onKeys, onLog, onHolds, []string{
		"INSERT INTO holdfast_outbox (id, lane, name, body, content_type, published_at) VALUES (gen_random_uuid(), 0, 'a', '', '', now())",
		"UPDATE holdfast_outbox_dedup SET key = 'b'",
	})...)
}

func TestGrantsRelay(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	owner, p := d.as(t, d.owner), d.role(t, "relay")
	keeps := must(outboxpgx.New(p.pool, outboxpgx.Config{Schema: d.schema, Retention: time.Hour, Logger: quiet}))(t)
	for _, store := range []*outboxpgx.Store{p.outbox, keeps} {
		publisher := outboxtest.NewPublisher()
		var failures atomic.Int32
		publisher.Respond(func(m outboxdriver.Message) error {
			if m.Name == "never" || m.Name == "later" && failures.Add(1) == 1 {
				return errors.New("not now")
			}
			return nil
		})
		relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: quiet, Retry: outbox.RetryPolicy{MaxAttempts: 2, BaseDelay: time.Millisecond, MaxDelay: time.Millisecond}}))(t)
		owner.write(t, "later", "behind", "never")
		report := must(relay.Drain(t.Context(), outbox.Bounds{Limit: 5, TimeLimit: time.Minute}))(t)
		if report.Published != 2 || report.Failed != 3 || report.Dead != 1 {
			t.Errorf("%+v", report)
		}
	}
	d.exec(t, `UPDATE holdfast_outbox SET published_at = now() - interval '2 hours';
		INSERT INTO holdfast_outbox_dedup VALUES ('a', gen_random_uuid(), now() - interval '1 hour');
		INSERT INTO holdfast_outbox_audit (at, actor, reason, action, count, filter) VALUES (now() - interval '2 years', 'ada', '', 'replay', 1, '{}')`)
	if n := must(keeps.Prune(t.Context()))(t); n != 4 {
		t.Errorf("%d rows are pruned, want two messages, a key and an entry", n)
	}
	if err := p.outbox.Check(t.Context()); err != nil && strings.Contains(err.Error(), "permission") {
		t.Errorf("Check = %v", err) // other findings are about the server
	}
	_, err := p.history.Add(t.Context(), operator.Process{Beat: 1}, []operator.Figures{{Part: "outbox", Done: 1}})
	check(t, err)
	if all := must(p.history.Processes(t.Context()))(t); len(all) != 1 {
		t.Errorf("processes %+v", all)
	}
	check(t, p.history.Leave(t.Context(), uuid.Nil))
	if depth := must(p.outbox.Depth(t.Context()))(t); depth.Dead != 2 {
		t.Errorf("%+v", depth)
	}
	p.refused(t, allOf(toOutbox, onInbox, onKeys, onLog, onHolds, []string{
		"UPDATE holdfast_outbox SET body = ''", "UPDATE holdfast_outbox SET ordering_key = ''", "DELETE FROM holdfast_outbox_lanes",
		"DELETE FROM holdfast_outbox_dead", "UPDATE holdfast_outbox_dead SET id = gen_random_uuid()", "SELECT actor FROM holdfast_outbox_audit",
		"INSERT INTO holdfast_outbox_audit (actor, reason, action, count, filter) VALUES ('', '', '', 0, '{}')", "UPDATE holdfast_outbox_audit SET actor = ''",
	})...)
}

func TestGrantsConsume(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	p := d.role(t, "consume")
	var broken, handled atomic.Int32
	check(t, inboxpgx.Handle(p.inbox, "order.paid", func(context.Context, pgx.Tx, map[string]string) error {
		handled.Add(1)
		if broken.Load() > 0 {
			return errors.New("not now")
		}
		return nil
	}))
	letters, sendTo, stop := p.consume(t)
	send := func(id uuid.UUID) {
		t.Helper()
		sendTo(id, "one key")
	}
	first := must(uuid.NewV7())(t)
	check(t, p.inbox.Check(t.Context()))
	send(first)
	send(first)
	if n := handled.Load(); n != 1 {
		t.Errorf("one message is handled %d times", n)
	}
	broken.Store(1)
	send(must(uuid.NewV7())(t))
	send(must(uuid.NewV7())(t)) // waits behind the dead letter of its key
	broken.Store(0)
	if n := must(letters.Count(t.Context(), inbox.Filter{}))(t); n != 1 {
		t.Errorf("%d dead letters", n)
	}
	handled.Store(0)
	must(letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "ada"}))(t)
	testenv.Eventually(t, func() error {
		if n := handled.Load(); n != 2 {
			return fmt.Errorf("after the replay %d are handled", n)
		}
		return nil
	})
	stop()
	d.exec(t, "UPDATE holdfast_inbox SET processed_at = now() - interval '1 year'")
	if n := must(p.inbox.Prune(t.Context()))(t); n != 3 {
		t.Errorf("%d entries are pruned, want 3", n)
	}
	p.refused(t, allOf(onOutbox, toOutbox, onKeys, onLog, onHolds, []string{
		"UPDATE holdfast_inbox SET message_id = gen_random_uuid()", "INSERT INTO holdfast_inbox VALUES ('a', gen_random_uuid(), 'infinity')",
	})...)
}

// consume runs a consumer that parks keys, until stop is called.
func (p parts) consume(t *testing.T) (letters inbox.DeadLetters, send func(id uuid.UUID, key string), stop func()) {
	t.Helper()
	broker := inboxtest.NewBroker()
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, p.inbox, inbox.ConsumerConfig{
		Logger: quiet, Ordered: true, ParkKeys: true, Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: time.Millisecond, MaxDelay: time.Millisecond},
	}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	return consumer.DeadLetters(), func(id uuid.UUID, key string) {
			t.Helper()
			check(t, broker.Send(t.Context(), &inbox.Message{ID: id, Name: "order.paid", Key: key, Body: []byte("{}")}))
			check(t, broker.Idle(t.Context()))
		}, func() {
			cancel()
			check(t, <-ended)
		}
}

// park makes a message of each key a dead letter. The key waits for it.
func (p parts) park(t *testing.T, keys ...string) {
	t.Helper()
	check(t, inboxpgx.Handle(p.inbox, "order.paid", func(context.Context, pgx.Tx, map[string]string) error {
		return inbox.Unrecoverable(errors.New("no such order"))
	}))
	_, send, stop := p.consume(t)
	for _, key := range keys {
		send(must(uuid.NewV7())(t), key)
	}
	stop()
}

func TestGrantsIdempotency(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	p := d.role(t, "idempotency")
	check(t, p.keys.Check(t.Context()))
	_, _, err := p.keys.DoKey(t.Context(), idempotency.NewKey(), nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201}, nil
	})
	check(t, err)
	for _, end := range []func(driver.Claim) error{
		func(c driver.Claim) error { return p.keys.Complete(t.Context(), c, driver.Response{Status: 200}) },
		func(c driver.Claim) error { return p.keys.Release(t.Context(), c) },
	} {
		c := driver.NewClaim(driver.Key(idempotency.NewKey()), driver.FingerprintOf("a"))
		must(p.keys.Begin(t.Context(), c))(t)
		check(t, p.keys.Extend(t.Context(), c))
		check(t, end(c))
	}
	d.exec(t, "UPDATE holdfast_idempotency SET expires_at = now() - interval '1 s'")
	if n := must(p.keys.Prune(t.Context()))(t); n != 3 {
		t.Errorf("%d records are pruned, want 3: one of a transaction, two of claims", n)
	}
	p.refused(t, allOf(onOutbox, toOutbox, onInbox, onLog, onHolds)...)
}

func TestGrantsSweep(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	p := d.role(t, "sweep")
	sweeper := must(expiry.NewSweeper(p.holds, expiry.SweeperConfig{Logger: quiet}))(t)
	if r := must(sweeper.Sweep(t.Context()))(t); r.Expired != 1 {
		t.Errorf("%+v", r)
	}
	p.refused(t, allOf(onOutbox, toOutbox, onInbox, onKeys, onLog, []string{"UPDATE holds SET expires_at = now()", "UPDATE holds SET customer = ''"})...)
}

func TestGrantsOperate(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	owner := d.as(t, d.owner)
	owner.write(t, "a", "b", "c")
	publisher := outboxtest.NewPublisher()
	publisher.Respond(func(outboxdriver.Message) error {
		return &outboxdriver.PublishError{Class: outboxdriver.Permanent, Err: errors.New("no exchange")}
	})
	relay := must(outbox.NewRelay(owner.outbox, publisher, outbox.RelayConfig{Logger: quiet}))(t)
	must(relay.Drain(t.Context(), outbox.Bounds{}))(t)
	d.exec(t, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('billing', gen_random_uuid(), now() - interval '1 year');
		INSERT INTO holdfast_idempotency (key, fingerprint, fingerprint_version, status, token, expires_at) VALUES ('old', '', 0, 'completed', '', now() - interval '1 hour')`)

	p := d.role(t, "operate")
	o := p.operator(t, nil)
	o.wants(t, 1, []string{"status"}, "outbox  0      0       3", "holds  1")
	o.wants(t, 0, []string{"groups"}, "no exchange")
	o.wants(t, 0, []string{"outbox", "dead"}, "no exchange")
	var id string
	check(t, d.owner.QueryRow(t.Context(), `SELECT id::text FROM holdfast_outbox_dead LIMIT 1`).Scan(&id))
	o.wants(t, 0, []string{"show", id}, "dead letter", "no exchange")
	check(t, d.owner.QueryRow(t.Context(), `SELECT message_id::text FROM holdfast_inbox LIMIT 1`).Scan(&id))
	o.wants(t, 0, []string{"show", id}, "billing  processed")
	o.wants(t, 0, []string{"drop", "--from=outbox", "--name=c", "--by=ada"}, "1 dropped")
	o.wants(t, 0, []string{"retry", "--from=outbox", "--name=a", `--patch={"fixed":true}`, "--by=ada"}, "1 retried")
	o.wants(t, 0, []string{"retry", "--from=outbox", "--all", "--by=ada"}, "1 retried")
	o.wants(t, 0, []string{"pause", "outbox", "billing", "--by=ada", "--reason=a test"}, "outbox is paused", "billing is paused")
	o.wants(t, 1, []string{"status"}, "outbox is paused by ada since", "billing is paused by ada since")
	o.wants(t, 0, []string{"resume", "outbox", "billing", "--by=ada"}, "outbox is resumed", "billing is resumed")
	owner.park(t, "ada", "bob")
	o.wants(t, 0, []string{"inbox", "dead"}, "ada", "bob")
	o.wants(t, 0, []string{"retry", "--from=inbox", "--key=ada", "--by=ada"}, "billing: 1 retried")
	o.wants(t, 0, []string{"drop", "--from=inbox", "--all", "--by=ada"}, "billing: 1 dropped")
	o.wants(t, 0, []string{"outbox", "pending"}, "one key")
	d.exec(t, `INSERT INTO holdfast_outbox (id, lane, name, body, content_type, due_at) VALUES (gen_random_uuid(), 0, 'later', '', '', now() + interval '1 hour')`)
	o.wants(t, 0, []string{"postpone", "--name=later", "--for=2h", "--by=ada"}, "outbox: 1 postponed")
	o.wants(t, 0, []string{"retry", "--retrying", "--name=later", "--by=ada"}, "outbox: 1 retried")
	o.wants(t, 0, []string{"drop", "--retrying", "--name=later", "--by=ada"}, "outbox: 1 dropped")
	o.wants(t, 1, []string{"expiry", "stuck"}, "holds")
	o.wants(t, 0, []string{"idempotency", "show", "a"}, "free")
	o.wants(t, 0, []string{"prune"}, "billing      1", "idempotency  1")
	if log := o.wants(t, 0, []string{"log"}, "ada"); strings.Count(log, "\n") != 15 { // a prune without effect is not logged
		t.Errorf("the log has %s", log)
	}
	p.refused(t, allOf(toOutbox[1:], onHolds[:1], []string{
		"UPDATE holdfast_outbox SET body = ''", "UPDATE holdfast_outbox_lanes SET token = 1", "UPDATE holdfast_outbox_dead SET body = ''", "UPDATE holdfast_outbox_audit SET actor = ''",
		"UPDATE holdfast_inbox SET message_id = gen_random_uuid()", "UPDATE holdfast_idempotency SET body = ''", "UPDATE holdfast_operator_log SET actor = ''",
	})...)
}

// A service may call Migrate at each start without the right to create tables.
func TestGrants_migrate(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	for job, migrations := range map[string]func(p parts) []func(context.Context) error{
		"write": func(p parts) []func(context.Context) error { return []func(context.Context) error{p.outbox.Migrate} },
		"relay": func(p parts) []func(context.Context) error {
			return []func(context.Context) error{p.outbox.Migrate, p.history.Migrate}
		},
		"consume": func(p parts) []func(context.Context) error {
			return []func(context.Context) error{p.inbox.Migrate, p.history.Migrate}
		},
		"idempotency": func(p parts) []func(context.Context) error { return []func(context.Context) error{p.keys.Migrate} },
		"operate": func(p parts) []func(context.Context) error {
			return []func(context.Context) error{p.outbox.Migrate, p.inbox.Migrate, p.keys.Migrate, p.log.Migrate, p.history.Migrate}
		},
	} {
		for _, migrate := range migrations(d.role(t, job)) {
			if err := migrate(t.Context()); err != nil {
				t.Errorf("%s: %v", job, err)
			}
		}
	}
}

func TestGrantsMistakes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, args := range [][]string{
		{"--job=write"}, {"--to=x"}, {"--job=everything", "--to=x"}, {"--job=write", "--to="}, {"--job=write", "--to=a\nb"}, {"--job=write", "--to=on fakes"},
	} {
		if code, out, _ := r.run(t, append([]string{"schema", "grants"}, args...)...); code != 2 || out != "" {
			t.Errorf("%q exits with %d: %s", args, code, out)
		}
	}
}

// database has the tables of all packages in a schema, and the table holds of a shop.
type database struct {
	schema, url string
	owner       *pgxpool.Pool
}

func newDatabase(t *testing.T) *database {
	t.Helper()
	pool, schema := pgtest.NewSchema(t)
	d := &database{schema, pool.Config().ConnString(), pool}
	as := d.as(t, pool)
	for _, migrate := range []func(context.Context) error{as.outbox.Migrate, as.inbox.Migrate, as.keys.Migrate, as.log.Migrate, as.history.Migrate} {
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

// parts are the packages on the connections of one role.
type parts struct {
	pool    *pgxpool.Pool
	manager *txretry.Manager
	outbox  *outboxpgx.Store
	inbox   *inboxpgx.Store
	keys    *idempotencypgx.Store
	holds   *expirypgx.Store
	log     *operator.PostgresLog
	history *operator.PostgresHistory
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
		log:    must(operator.NewPostgresLog(pool))(t), history: must(operator.NewPostgresHistory(pool))(t),
	}
}

func (p parts) operator(t *testing.T, relay *outbox.Relay) *rig {
	t.Helper()
	consumer := must(inboxtest.NewConsumer(inboxtest.NewBroker(), inboxtest.Queue{Name: "billing"}, p.inbox, inbox.ConsumerConfig{Ordered: true, ParkKeys: true, Logger: quiet}))(t)
	return &rig{cfg: operator.Config{
		Outboxes:  []operator.Outbox{{Store: p.outbox, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: p.inbox}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: p.holds}},
		Parts:     []operator.Part{{Name: "idempotency", Part: p.keys}},
		Log:       p.log,
		History:   p.history,
	}}
}

// role makes a role with the privileges that are printed for the job, and returns the packages on its connections.
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
		t.Fatalf("the connections belong to %q", user)
	}
	return d.as(t, pool)
}

// refused checks that the role may run none of the statements.
func (p parts) refused(t *testing.T, statements ...string) {
	t.Helper()
	const insufficientPrivilege = "42501"
	for _, table := range []string{"outbox", "outbox_lanes", "outbox_dead", "outbox_audit", "outbox_pause", "outbox_dedup", "inbox", "inbox_attempts", "inbox_stopped", "inbox_waiting", "inbox_pause", "idempotency", "operator_log", "history"} {
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

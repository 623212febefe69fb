package operator_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/redis/go-redis/v9"

	sweeps "github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	lacks "github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
)

func TestStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 1, []string{"status"}, "OUTBOX", "billing", "unrecoverable 3", "holds", "2")
	var s struct {
		Outboxes []struct {
			Name string
			Dead int
		}
		Consumers []struct{ Dead map[string]int }
		Sweeps    []struct{ Overdue int }
	}
	check(t, json.Unmarshal([]byte(r.wants(t, 1, []string{"status", "--json"})), &s))
	if s.Outboxes[0].Name != "outbox" || s.Outboxes[0].Dead != 2 || s.Consumers[0].Dead["unrecoverable"] != 3 || s.Sweeps[0].Overdue != 2 {
		t.Errorf("%+v", s)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	screens, errs := 0, bytes.Buffer{}
	out := writerFunc(func(screen []byte) {
		if screens += bytes.Count(screen, []byte("OUTBOX")); screens == 2 {
			stop() // as an interrupt does
		}
	})
	if code := command.Run(ctx, r.cfg, []string{"status", "--watch=10ms"}, out, &errs); code != 0 || screens < 2 || errs.Len() > 0 {
		t.Errorf("--watch exits with %d after %d screens: %q", code, screens, errs.String())
	}
}

// writerFunc is called with each write.
type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

// A part whose server is down hides neither the other parts nor its error.
func TestUnreachableParts(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "gone", Consumer: gone{}})
	r.cfg.Servers = []operator.Server{{Name: "RabbitMQ", Ping: func(context.Context) error { return errGone }}}
	for _, args := range [][]string{{"status"}, {"inbox", "dead"}, {"groups"}} {
		code, out, errs := r.run(t, args...)
		if code != 1 || !strings.Contains(out, "billing") || !strings.Contains(errs, "gone: nobody is there") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %q %q", args, code, out, errs)
		}
	}
	body := serve(t, r, page.Config{}).get(t, "", 200, "goneConsumer", "nobody is there", "Not measured")
	_, card, _ := strings.Cut(body, `id="part-gone"`)
	if card, _, _ = strings.Cut(card, "</section>"); strings.Contains(card, ">0") || strings.Count(card, "<dd>–</dd>") != 4 {
		t.Errorf("the card has numbers: %s", card)
	}
	if code, out, _ := r.run(t, "doctor", "--json"); code != 1 || out != "[]\n" {
		t.Errorf("doctor --json exits with %d: %q", code, out)
	}
	code, out, errs := r.run(t, "doctor")
	if code != 1 || out != "" || errs != "holdfast: RabbitMQ is unreachable: nobody is there\n" {
		t.Errorf("doctor exits with %d: %q %q", code, out, errs)
	}
}

var errGone = errors.New("nobody is there")

// cutOff is a consumer whose broker refuses connections.
type cutOff struct{ gone }

var errRefused = errors.New("dial tcp 10.0.0.7:5672: connect: connection refused")

func (cutOff) Stats(context.Context) (inbox.Stats, error) {
	return inbox.Stats{}, fmt.Errorf("inboxamqp: stats: %w", errRefused)
}

// A server that is down is one problem everywhere, with the server's name.
func TestServerDown_isOneProblem(t *testing.T) {
	t.Parallel()
	r := &rig{cfg: operator.Config{
		Consumers: []operator.Consumer{{Name: "billing", Consumer: cutOff{}}, {Name: "mail", Consumer: cutOff{}}},
		Servers:   []operator.Server{{Name: "RabbitMQ", Ping: func(context.Context) error { return errRefused }}},
	}}
	const sentence = "RabbitMQ does not answer: billing and mail wait"
	out := r.wants(t, 1, []string{"status"}, "1 problem ", "! "+sentence+" (HoldfastConsumerDisconnected): dial tcp 10.0.0.7:5672: connect: connection refused\n", "billing   –        –         –        –")
	if n := strings.Count(out, "refused"); n != 1 {
		t.Errorf("the error is shown %d times: %s", n, out)
	}
	r.wants(t, 1, []string{"status", "--json"}, `"part": "RabbitMQ"`, `"text": "does not answer: billing and mail wait"`, `"affected": [`)
	body := serve(t, r, page.Config{}).get(t, "", 200, "1 problem", sentence, "Parts: billing, mail", "Runbook: HoldfastConsumerDisconnected", `href="#part-mail"`)
	if n := strings.Count(body, "refused"); n != 1 {
		t.Errorf("the page shows the error %d times: %s", n, body)
	}
}

// The JSON has no numbers of parts that did not answer, and the page shows none.
func TestStatus_unmeasured(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	down := errors.New("it is down")
	answersOnce := &faltering{Store: r.cfg.Outboxes[0].Store.(*outboxtest.Store)}
	must(answersOnce.Depth(t.Context()))(t)
	r.cfg.Outboxes[0].Store = answersOnce
	r.cfg.Consumers[0].Inbox = unprocessed{down}
	r.cfg.Sweeps[0].Store = sweepless{r.cfg.Sweeps[0].Store, down}
	r.cfg.Parts = []operator.Part{{Name: "keys", Part: uncounted{down}}}
	ping := func(context.Context) error { return nil }
	r.cfg.Servers = []operator.Server{
		{Name: "Postgres", Ping: ping, Connections: func(context.Context) ([]operator.Connections, int, error) { return nil, 0, down }},
		{Name: "Redis", Ping: ping, Connections: func(context.Context) ([]operator.Connections, int, error) { return nil, 0, nil }},
	}
	var s map[string]json.RawMessage
	_, out, _ := r.run(t, "status", "--json")
	check(t, json.Unmarshal([]byte(out), &s))
	for field, want := range map[string]string{
		"outboxes": `[{"name":"outbox","error":"it is down"}]`, "consumers": `[{"name":"billing","error":"it is down"}]`, "sweeps": `[{"name":"holds","error":"it is down"}]`,
		"claims": `[{"part":"keys","error":"it is down"}]`, "connections": `[{"server":"Postgres","error":"it is down"}]`,
	} {
		var got bytes.Buffer
		if check(t, json.Compact(&got, s[field])); got.String() != want {
			t.Errorf("%s: %s, want %s", field, &got, want)
		}
	}
	body := serve(t, r, page.Config{}).get(t, "", 200, "Not measured")
	if strings.Contains(body, "<dd>0") || strings.Contains(body, "0.0/s") || strings.Contains(body, "0 in all") {
		t.Errorf("the page has numbers: %s", body)
	}
}

// unprocessed is an inbox that does not count.
type unprocessed struct{ err error }

func (u unprocessed) Processed(context.Context, time.Duration) (int, error) { return 0, u.err }

// sweepless is a table that does not answer.
type sweepless struct {
	sweeps.Store
	err error
}

func (s sweepless) Look(context.Context, []string) (sweeps.Outlook, error) {
	return sweeps.Outlook{}, s.err
}

// gone is a consumer whose broker is down.
type gone struct{}

func (gone) DeadLetters() inbox.DeadLetters             { return noLetters{} }
func (gone) Stats(context.Context) (inbox.Stats, error) { return inbox.Stats{}, errGone }

type noLetters struct{ inbox.DeadLetters }

func (noLetters) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) { return nil, errGone }

func (noLetters) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) { return nil, errGone }

// The status shows nearly used up limits first, claims in flight, and connections.
func TestStatusOfLimitsClaimsAndConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Limiters[0].Keys = []string{"", "grace"}
	_, err := r.limiter.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: "grace", Cost: 9})
	check(t, err)
	keys := idempotencytest.NewStore()
	must(keys.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), driver.FingerprintOf("a"))))(t)
	r.cfg.Parts = append(r.cfg.Parts, operator.Part{Name: "keys", Part: keys})
	down := errors.New("it is down")
	r.cfg.Parts = append(r.cfg.Parts, operator.Part{Name: "broken", Part: uncounted{down}})
	ping := func(context.Context) error { return nil }
	r.cfg.Servers = []operator.Server{
		{Name: "Postgres", Ping: ping, Connections: func(context.Context) ([]operator.Connections, int, error) {
			return []operator.Connections{{Role: "relay", Program: "shop\x1b[2J", Active: 1, Waiting: 2, Idle: 3}}, 100, nil
		}},
		{Name: "Standby", Ping: ping, Connections: func(context.Context) ([]operator.Connections, int, error) { return nil, 0, down }},
	}
	r.wants(t, 1, []string{"status"}, "grace        10   1m0s  1 ", ", nearly used up\nuser   all callers  10   1m0s  10 ", "keys    1\n", "broken  –\n",
		"relay  shop [2J  1 active, 2 in a transaction, 3 idle", "all              6 of 100\n", "Standby   –      –         –\n", "! broken: the keys cannot be counted (HoldfastIdempotencyStoreDown): it is down", "! Standby: the server does not answer: it is down\n")
	r.wants(t, 1, []string{"status", "--json"}, `"in_flight": 1`, `"waiting": 2`)
	s := serve(t, r, page.Config{})
	s.get(t, "", 200, "1 of 10 per 1 min nearly used", "all callers", "keys1", "relayshop [2J123", "6 of 100 in all", "Standbyit is down")
}

// uncounted has claims in flight that it cannot count.
type uncounted struct{ err error }

func (u uncounted) InFlight(context.Context) (int, bool, error) { return 0, false, u.err }

// many has more keys than it scans.
type many struct {
	took  time.Duration
	reads int
}

func (m *many) InFlight(context.Context) (int, bool, error) {
	m.reads++
	time.Sleep(m.took)
	return 50, false, nil
}

// An estimate is marked as one.
func TestStatusOfEstimatedClaims(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Parts = append(r.cfg.Parts, operator.Part{Name: "gate", Part: &many{}})
	r.wants(t, 1, []string{"status"}, "gate  ~50\n")
	r.wants(t, 1, []string{"status", "--json"}, `"in_flight": 50`, `"estimated": true`)
	serve(t, r, page.Config{}).get(t, "", 200, "gate~50")
}

// Watching the status costs the server of the claims a hundredth of its time.
func TestClaimsAreCountedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := &many{took: 100 * time.Millisecond}
		service := operator.Config{Parts: []operator.Part{{Name: "gate", Part: keys}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out bytes.Buffer
		code := command.Run(ctx, service, []string{"status", "--watch"}, &out, io.Discard)
		if shown := strings.Count(out.String(), "gate  ~50"); code != 0 || keys.reads > 6 || keys.reads < 5 || shown < 25 {
			t.Errorf("exits with %d: %d reads for %d screens", code, keys.reads, shown)
		}
	})
}

// The status on a terminal shows lanes, breakers and rates, as the page does.
func TestStatusOfWork(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.serves(t)
	r.wants(t, 1, []string{"status"}, "outbox  0      0       2     0s      0.0       0.0     0 held  default closed\n", "billing   0        0         0        0.0          3     unrecoverable 3\n")
	r.wants(t, 1, []string{"status", "--json"}, `"stored_per_second": 0`, `"left_per_second": 0`, `"processed_per_second": 0`, `"lanes_leased": 0`, `"state": "closed"`)
	r.cfg.Outboxes[0].Relay = nil
	r.wants(t, 1, []string{"status"}, "0 held  of other processes\n")
}

// faltering answers once.
type faltering struct {
	*outboxtest.Store
	reads atomic.Int32
}

func (f *faltering) Depth(ctx context.Context) (outboxdriver.Depth, error) {
	if f.reads.Add(1) > 1 {
		return outboxdriver.Depth{}, errors.New("it is down")
	}
	return f.Store.Depth(ctx)
}

// The first answer of an outbox is shown even if the second read, for its rates, fails.
func TestStatusOfOneGoodAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Outboxes[0].Store = &faltering{Store: r.cfg.Outboxes[0].Store.(*outboxtest.Store)}
	r.wants(t, 1, []string{"status"}, "outbox  0      0       2     0s      –         –       0 held")
}

func TestRedisConnections(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	check(t, client.Do(t.Context(), "CLIENT", "SETNAME", "relay").Err())
	roles, _, err := operator.RedisConnections(func(ctx context.Context) (string, error) { return client.ClientList(ctx).Result() })(t.Context())
	mine := slices.ContainsFunc(roles, func(c operator.Connections) bool { return c.Role == "default" && c.Program == "relay" && c.Idle >= 1 })
	if err != nil || !mine {
		t.Errorf("%+v, %v", roles, err)
	}
	const answer = "id=1 name= flags=b user=worker lib-name=go-redis cmd=xreadgroup\nid=2 name= flags=bN user=worker lib-name=go-redis\n" +
		"id=3 name=shop flags=x user=api\nid=4 name=shop flags=N user=api\nid=5 flags=N\n"
	for text, want := range map[string]string{
		"":                "[{api shop 0 1 1} {worker go-redis 2 0 0} {  0 0 1}]",
		"NOPERM no right": "[]",
		"it is down":      "it is down",
	} {
		var failure error
		if text != "" {
			failure = errors.New(text)
		}
		roles, _, err := operator.RedisConnections(func(context.Context) (string, error) { return answer, failure })(t.Context())
		if got := fmt.Sprint(roles); got != want && (err == nil || err.Error() != want) {
			t.Errorf("%q: %s, %v, want %s", text, got, err, want)
		}
	}
}

// Status leaves claims out, without a failure, if the Redis user has no right to scan keys.
func TestClaimsOfAnotherUser(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	name := "test-" + rand.Text()
	for who, rights := range map[string]string{"": "+@all", name: "-scan"} {
		user := client
		if who != "" {
			check(t, client.ACLSetUser(t.Context(), who, "on", "nopass", "~*", "+@all", rights).Err())
			t.Cleanup(func() { _ = client.ACLDelUser(context.WithoutCancel(t.Context()), who).Err() })
			user = redis.NewClient(&redis.Options{Addr: client.Options().Addr, DB: client.Options().DB, Username: who, Password: "any"})
			t.Cleanup(func() { _ = user.Close() })
		}
		store := must(idempotencyredis.New(user, idempotencyredis.Config{}))(t)
		r := &rig{cfg: operator.Config{Parts: []operator.Part{{Name: "gate", Part: store}}}}
		if out := r.wants(t, 0, []string{"status"}); strings.Contains(out, "gate") != (who == "") {
			t.Errorf("%q: %s", who, out)
		}
	}
}

// It also leaves them out for a client that cannot list the nodes of its cluster.
func TestClaimsOfUnknownNodes(t *testing.T) {
	t.Parallel()
	part := operator.Part{Name: "gate", Part: uncounted{fmt.Errorf("in flight: %w", errors.ErrUnsupported)}}
	r := &rig{cfg: operator.Config{Parts: []operator.Part{part}}}
	if out := r.wants(t, 0, []string{"status"}, "All good"); strings.Contains(out, "gate") {
		t.Error(out)
	}
}

func TestPostgresConnections(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	roles, most, err := operator.PostgresConnections(d.owner)(t.Context())
	if err != nil || most < 1 || len(roles) == 0 || roles[0].Active+roles[0].Waiting+roles[0].Idle == 0 || roles[0].Role == "" {
		t.Errorf("%+v, %d, %v", roles, most, err)
	}
}

// unwritable is a log that cannot be written.
type unwritable struct{ operator.MemoryLog }

func (*unwritable) Begin(context.Context, operator.Action) (int64, error) {
	return 0, errors.New("the disk is full")
}

func TestNoted_failedLogPreventsChange(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Log = &unwritable{}
	code, _, errs := r.run(t, "drop", "--all", "--by=ada")
	if code != 1 || !strings.Contains(errs, "the disk is full") {
		t.Errorf("exits with %d: %s", code, errs)
	}
	if left := r.groups(t); len(left) != 4 {
		t.Errorf("left are %+v", left)
	}
}

// Upkeep by hand is logged with author, reason and count. A dry run is not logged.
func TestUpkeepIsNoted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Parts = []operator.Part{{Name: "aged", Part: &aged{3}}}
	for _, command := range []string{"sweep", "prune", "setup"} {
		r.wants(t, 0, []string{command, "--dry-run"})
		r.wants(t, 2, []string{command, "--by="})
	}
	if out := r.wants(t, 0, []string{"log"}); out != "" {
		t.Errorf("after dry runs the log has %q", out)
	}
	for _, command := range []string{"sweep", "prune", "setup"} {
		r.wants(t, 0, []string{command, "--by=ada", "--reason=why " + command})
	}
	for _, a := range must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 100}))(t) {
		got := fmt.Sprint(a.What, " ", a.On, " ", a.By, " ", a.Reason, " ", *a.Count)
		if !slices.Contains([]string{"sweep holds ada why sweep 2", "prune aged ada why prune 3", "prune outbox ada why prune 0", "prune billing ada why prune 0", "setup all parts ada why setup 1"}, got) {
			t.Errorf("the log has %q", got)
		}
	}
	r.wants(t, 0, []string{"log"}, "why sweep", "why prune", "why setup")
}

// refusing is a log whose table rejects entries.
type refusing struct {
	operator.MemoryLog
	code string
}

func (l *refusing) Begin(context.Context, operator.Action) (int64, error) {
	return 0, &pgconn.PgError{Code: l.code}
}

// A sweep runs although its role cannot write the log, or the log does not exist yet. If the log is down, a sweep with --by
// does not run; a sweep without --by runs, and the command fails.
func TestUpkeepWithoutRightToLog(t *testing.T) {
	t.Parallel()
	const by = "--by=ada"
	for code, missing := range map[string]bool{"42501": true, "42P01": true, "57P01": false} {
		for _, args := range [][]string{{"sweep", by}, {"sweep"}} {
			r := newRig(t)
			r.cfg.Log = &refusing{code: code}
			want, left := 0, "0"
			if !missing {
				want = 1
			}
			if !missing && len(args) > 1 {
				left = "2"
			}
			exit, _, errs := r.run(t, args...)
			if exit != want || strings.Contains(errs, "sweep: not logged: ") != missing || !strings.Contains(errs, code) {
				t.Errorf("%s: %v exits with %d: %q", code, args, exit, errs)
			}
			r.wants(t, 0, []string{"sweep", "--dry-run"}, "holds  "+left)
			r.wants(t, want, []string{"prune", by})
			r.wants(t, 0, []string{"prune"}) // nothing
			r.wants(t, 1, []string{"drop", "--all"})
			if left := r.groups(t); len(left) != 4 {
				t.Errorf("%s: left are %+v", code, left)
			}
		}
	}
}

// Upkeep by cron is logged only if it changed something, so it does not push out the actions of people.
func TestUpkeep_loggedOnlyIfItChanged(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for range 3 {
		for _, command := range []string{"sweep", "prune", "setup"} {
			r.wants(t, 0, []string{command})
		}
	}
	all := must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 100}))(t)
	if len(all) != 1 || all[0].What != "sweep" || *all[0].Count != 2 || all[0].By == "" {
		t.Errorf("the log has %+v", all)
	}
}

// Setup creates the table of the log before it is logged there.
func TestSetupIsNoted(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.NewSchema(t)
	log := must(operator.NewPostgresLog(pool))(t)
	r := &rig{cfg: operator.Config{Log: log}}
	r.wants(t, 0, []string{"setup", "--by=ada", "--reason=the first time"}, "log: tables")
	r.wants(t, 0, []string{"log"}, "setup", "all parts", "ada", "the first time", "log: tables")
}

// An outcome that the table drops is an error. The outcome of a deleted action is none.
func TestPostgresLog_droppedOutcome(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.NewSchema(t)
	log := must(operator.NewPostgresLog(pool))(t)
	check(t, log.Migrate(t.Context()))
	n := must(log.Begin(t.Context(), operator.Action{What: "retry"}))(t)
	must(pool.Exec(t.Context(), `CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER ignore BEFORE UPDATE ON holdfast_operator_log FOR EACH ROW EXECUTE FUNCTION ignore()`))(t)
	if err := log.End(t.Context(), n, 1, ""); err == nil || !strings.Contains(err.Error(), "ignored the outcome") {
		t.Errorf("End returns %v", err)
	}
	check(t, log.End(t.Context(), n+1, 1, ""))
}

// A migration whose connection falls silent does not block others for long: its transaction bounds how long the server
// keeps the lock.
func TestLogMigrate_boundsItsLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, sent := silent.NewPostgres(t, ""), ""
		s.Answer = func(sql string) (string, *pgproto3.ErrorResponse) {
			sent += sql + "\n"
			return "", nil
		}
		_ = must(operator.NewPostgresLog(s.Pool(t, 1)))(t).Migrate(t.Context()) // the script has no tables
		if bound, lock := strings.Index(sent, "idle_in_transaction_session_timeout"), strings.Index(sent, "pg_advisory_xact_lock"); bound < 0 || lock < bound {
			t.Errorf("it sends\n%s", sent)
		}
	})
}

func TestMemoryLogIsBounded(t *testing.T) {
	t.Parallel()
	var log operator.MemoryLog
	first := must(log.Begin(t.Context(), operator.Action{What: "first"}))(t)
	for i := range 1000 {
		n := must(log.Begin(t.Context(), operator.Action{What: fmt.Sprint(i)}))(t)
		check(t, log.End(t.Context(), n, i+1, ""))
	}
	check(t, log.End(t.Context(), first, 1, "")) // dropped long ago
	all := must(log.List(t.Context(), operator.LogFilter{Limit: 2000}))(t)
	if len(all) != 1000 || all[0].What != "999" || *all[0].Count != 1000 || slices.ContainsFunc(all, func(a operator.Action) bool { return a.What == "first" }) {
		t.Errorf("%d actions, the newest %+v", len(all), all[0])
	}
}

// Actions of people are found behind any number of sweeps.
func TestLogWithoutUpkeep(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{})
	pool, _ := pgtest.NewSchema(t)
	kept := must(operator.NewPostgresLog(pool))(t)
	check(t, kept.Migrate(t.Context()))
	for _, log := range []operator.Log{a.cfg.Log, kept} {
		for _, what := range append([]string{"retry"}, slices.Repeat([]string{"sweep", "prune", "setup"}, 100)...) {
			must(log.Begin(t.Context(), operator.Action{What: what, On: "holds", By: "ada"}))(t)
		}
		found := must(log.List(t.Context(), operator.LogFilter{Limit: 100, WithoutUpkeep: true}))(t)
		if len(found) != 1 || found[0].What != "retry" {
			t.Errorf("%T lists %+v", log, found)
		}
	}
	if out := a.wants(t, 0, []string{"log"}); strings.Contains(out, "retry") {
		t.Errorf("the newest are %s", out)
	}
	if out := a.wants(t, 0, []string{"log", "--without-upkeep"}, "retry"); strings.Contains(out, "sweep") {
		t.Errorf("without upkeep the log is %s", out)
	}
	a.answers(t, "log", map[string]any{"without_upkeep": true}, "retry", "!sweep")
	s := serve(t, a.rig, page.Config{Authorize: everything})
	s.get(t, "log", 200, `href="log?without-upkeep=1"`)
	s.get(t, "log?without-upkeep=1", 200, ">retry</td>", `href="log"`)
}

// The text of a failure may contain bytes that Postgres cannot store.
func TestFailureIsKept(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	r := newRig(t)
	log := must(operator.NewPostgresLog(d.owner))(t)
	r.cfg.Log, r.cfg.Consumers = log, []operator.Consumer{{Name: "odd", Consumer: odd{}}}
	r.wants(t, 1, []string{"drop", "--all", "--from=odd", "--by=ada"})
	r.wants(t, 0, []string{"log"}, "refused:  \ufffd!", "ada")
}

// odd is a consumer whose broker returns odd errors.
type odd struct{}

func (odd) DeadLetters() inbox.DeadLetters { return oddLetters{} }

type oddLetters struct{ inbox.DeadLetters }

func (oddLetters) Remove(context.Context, inbox.Filter, inbox.Removal) (int, error) {
	return 0, errors.New("refused: \x00\xff!")
}

// The status has the findings of all parts, each once, and checks again after five minutes. Findings are no problems.
func TestStatus_findings(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	queue := &misconfigured{}
	r.cfg = operator.Config{Parts: []operator.Part{{Name: "audit", Part: queue}, {Name: "copy", Part: queue}}}
	r.wants(t, 0, []string{"status"}, "All good", "Settings to fix: 2, shown by the command doctor")
	if n := queue.checks.Load(); n != 2 {
		t.Errorf("%d checks, want 2", n)
	}
	var s struct{ Findings []core.FindingState }
	check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"status", "--json"})), &s))
	want := []core.FindingState{{Part: "audit", Problem: "audit: queue a does not exist", Fix: "call Setup"}, {Part: "audit", Problem: "audit: queue b does not exist", Fix: "call Setup"}}
	if !slices.Equal(s.Findings, want) {
		t.Errorf("findings %+v, want %+v", s.Findings, want)
	}
	synctest.Test(t, func(t *testing.T) {
		o, err := core.New(r.cfg)
		check(t, err)
		queue.checks.Store(0)
		for range 301 { // seconds
			if s := o.ReadStatus(t.Context()); len(s.Findings) != 2 || !s.Verdict.Good {
				t.Fatalf("%+v", s)
			}
			time.Sleep(time.Second)
		}
		if n := queue.checks.Load(); n != 4 {
			t.Errorf("%d checks of two parts in 300 s, want 4", n)
		}
	})
}

// A check that hangs does not hold up the status.
func TestStatus_checkHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, err := core.New(operator.Config{Parts: []operator.Part{{Name: "hangs", Part: hangs{}}, {Name: "audit", Part: &misconfigured{}}}})
		check(t, err)
		began := time.Now()
		if s := o.ReadStatus(t.Context()); len(s.Findings) != 2 || time.Since(began) != 2*time.Second {
			t.Errorf("%d findings after %v", len(s.Findings), time.Since(began))
		}
	})
}

// misconfigured is a part whose Check has two findings and one failure.
type misconfigured struct{ checks atomic.Int32 }

func (m *misconfigured) Check(context.Context) error {
	m.checks.Add(1)
	return errors.Join(lacks.New("audit", "queue a does not exist", "call Setup"), lacks.New("audit", "queue b does not exist", "call Setup"), errGone)
}

type hangs struct{}

func (hangs) Check(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

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

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
)

func TestStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"status"}, "OUTBOX", "billing", "unrecoverable 3", "holds", "2")
	var s struct {
		Outboxes []struct {
			Name string
			Dead int
		}
		Consumers []struct{ Dead map[string]int }
		Sweeps    []struct{ Overdue int }
	}
	check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"status", "--json"})), &s))
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

// writerFunc sees what is written.
type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

// A part whose server is down neither hides the others nor what is wrong.
func TestPartsThatCannotBeAsked(t *testing.T) {
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
	if code, out, _ := r.run(t, "doctor", "--json"); code != 1 || out != "[]\n" {
		t.Errorf("doctor --json exits with %d: %q", code, out)
	}
	code, out, errs := r.run(t, "doctor")
	if code != 1 || out != "" || errs != "holdfast: RabbitMQ cannot be asked: nobody is there\n" {
		t.Errorf("doctor exits with %d: %q %q", code, out, errs)
	}
}

var errGone = errors.New("nobody is there")

// gone is a consumer whose broker is down.
type gone struct{}

func (gone) DeadLetters() inbox.DeadLetters             { return noLetters{} }
func (gone) Stats(context.Context) (inbox.Stats, error) { return inbox.Stats{}, errGone }

type noLetters struct{ inbox.DeadLetters }

func (noLetters) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) { return nil, errGone }

func (noLetters) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) { return nil, errGone }

// The status shows the limits that are near their edge first, claims in flight, and who is connected.
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
	r.wants(t, 1, []string{"status"}, "grace        10   1m0s  1 ", ", near its edge\nuser   all callers  10   1m0s  10 ", "keys    1\n", "broken  ?\n",
		"relay  shop [2J  1 active, 2 in a transaction, 3 idle", "all              6 of 100\n", "Standby   ?      ?         ?\n", "! broken: it is down", "! Standby: it is down")
	r.wants(t, 1, []string{"status", "--json"}, `"in_flight": 1`, `"waiting": 2`)
	s := serve(t, r, page.Config{})
	s.get(t, "", 200, "1 of 10 in 1m0s, near its edge", "all callers", "keys1", "relayshop [2J123", "6 of 100 in all", "Standbyit is down")
}

// uncounted has claims in flight that it cannot count.
type uncounted struct{ err error }

func (u uncounted) InFlight(context.Context) (int, bool, error) { return 0, false, u.err }

// many has more keys than it goes through.
type many struct {
	took  time.Duration
	looks int
}

func (m *many) InFlight(context.Context) (int, bool, error) {
	m.looks++
	time.Sleep(m.took)
	return 50, false, nil
}

// An estimate is shown as one.
func TestStatusOfEstimatedClaims(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Parts = append(r.cfg.Parts, operator.Part{Name: "gate", Part: &many{}})
	r.wants(t, 0, []string{"status"}, "gate  ~50\n")
	r.wants(t, 0, []string{"status", "--json"}, `"in_flight": 50`, `"estimated": true`)
	serve(t, r, page.Config{}).get(t, "", 200, "gate~50")
}

// Who watches costs the server of the claims a hundredth of its time.
func TestClaimsAreCountedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := &many{took: 100 * time.Millisecond}
		service := operator.Config{Parts: []operator.Part{{Name: "gate", Part: keys}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out bytes.Buffer
		code := command.Run(ctx, service, []string{"status", "--watch"}, &out, io.Discard)
		if shown := strings.Count(out.String(), "gate  ~50"); code != 0 || keys.looks > 6 || keys.looks < 5 || shown < 25 {
			t.Errorf("exits with %d: %d looks for %d screens", code, keys.looks, shown)
		}
	})
}

// The status on a terminal tells what the page does of lanes, breakers and rates.
func TestStatusOfWork(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"status"}, "outbox  0      0       2     0s      0.0       0.0     0 held  default closed\n", "billing   0        0         0        0.0          3     unrecoverable 3\n")
	r.wants(t, 0, []string{"status", "--json"}, `"stored_per_second": 0`, `"left_per_second": 0`, `"processed_per_second": 0`, `"lanes_leased": 0`, `"state": "closed"`)
	r.cfg.Outboxes[0].Relay = nil
	r.wants(t, 0, []string{"status"}, "0 held  of other processes\n")
}

// faltering answers once.
type faltering struct {
	*outboxtest.Store
	looks atomic.Int32
}

func (f *faltering) Depth(ctx context.Context) (outboxdriver.Depth, error) {
	if f.looks.Add(1) > 1 {
		return outboxdriver.Depth{}, errors.New("it is down")
	}
	return f.Store.Depth(ctx)
}

// What an outbox has answered is told, also where the second look, for its rates, fails.
func TestStatusOfOneGoodAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Outboxes[0].Store = &faltering{Store: r.cfg.Outboxes[0].Store.(*outboxtest.Store)}
	r.wants(t, 0, []string{"status"}, "outbox  0      0       2     0s      -         -       0 held")
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

// Status leaves claims out, without a failure, where the user of Redis may not go through its keys.
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

// Nor is who has a client that cannot list the nodes of its cluster.
func TestClaimsOfUnknownNodes(t *testing.T) {
	t.Parallel()
	part := operator.Part{Name: "gate", Part: uncounted{fmt.Errorf("in flight: %w", errors.ErrUnsupported)}}
	r := &rig{cfg: operator.Config{Parts: []operator.Part{part}}}
	if out := r.wants(t, 0, []string{"status"}); strings.Contains(out, "gate") {
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

package idempotencyredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

func TestLayout(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record, lock := "idempotency:"+string(key), "idempotency:lock:"+string(key)
	c := driver.NewClaim(key, fp)

	begin(t, s, c)
	fields := hash(t, client, record)
	created := fields["created"]
	if fields["status"] != "processing" || fields["token"] != c.Token || fields["fp"] != fp.Sum || fields["fpv"] != "1" || len(created) != 13 {
		t.Errorf("processing: %v", fields)
	}
	if token := client.Get(t.Context(), lock).Val(); token != c.Token {
		t.Errorf("lock holds %q, want the token", token)
	}
	ends(t, client, lock, 30*time.Second)
	ends(t, client, record, 30*time.Second)
	must(t, s.Extend(t.Context(), c))
	ends(t, client, lock, 30*time.Second)
	ends(t, client, record, 30*time.Second)

	resp := driver.Response{Status: 201, Header: map[string][]string{"Location": {"/1"}}, Body: []byte(`{"id":1}`)}
	must(t, s.Complete(t.Context(), c, resp))
	want := map[string]string{
		"status": "completed", "token": c.Token, "fp": fp.Sum, "fpv": "1",
		"code": "201", "hdr": `{"Location":["/1"]}`, "body": `{"id":1}`, "created": created,
	}
	fields = hash(t, client, record)
	for name, value := range want {
		if fields[name] != value {
			t.Errorf("completed: %s = %q, want %q", name, fields[name], value)
		}
	}
	if len(fields) != len(want) || client.Exists(t.Context(), lock).Val() != 0 {
		t.Errorf("completed: %v, or the lock is still there", fields)
	}
	ends(t, client, record, 48*time.Hour)
}

func TestRecordsOfOtherSystems(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record, lock := "idempotency:"+string(key), "idempotency:lock:"+string(key)
	for name, tt := range map[string]struct {
		fields map[string]any
		lock   string
		want   driver.State
		status int
		body   string
	}{
		"completed":               {map[string]any{"status": "completed", "response": `{"id":1}`}, "", driver.Completed, 200, `{"id":1}`},
		"completed, still locked": {map[string]any{"status": "completed", "response": `{}`}, "x", driver.Completed, 200, `{}`},
		"completed, no response":  {map[string]any{"status": "completed"}, "", driver.Completed, 0, ""},
		"damaged code":            {map[string]any{"status": "completed", "code": "abc"}, "", driver.Completed, 0, ""},
		"damaged headers":         {map[string]any{"status": "completed", "code": "200", "hdr": "["}, "", driver.Completed, 0, ""},
		"processing, locked":      {map[string]any{"status": "processing"}, "1", driver.InProgress, 0, ""},
		"locked, no record yet":   {nil, "1", driver.InProgress, 0, ""},
		"processing, no lock":     {map[string]any{"status": "processing", "response": "old"}, "", driver.Acquired, 0, ""},
	} {
		client.Del(t.Context(), record, lock)
		if tt.fields != nil {
			client.HSet(t.Context(), record, tt.fields)
		}
		if tt.lock != "" {
			client.Set(t.Context(), lock, tt.lock, 0) // no expiry, as after a crash between two commands
		}
		out := begin(t, s, driver.NewClaim(key, fp))
		if out.State != tt.want || out.Response.Status != tt.status || string(out.Response.Body) != tt.body {
			t.Errorf("%s: %+v", name, out)
		}
		if fp.Conflicts(out.Fingerprint) {
			t.Errorf("%s: fingerprint %+v", name, out.Fingerprint)
		}
		if out.State == driver.InProgress {
			ends(t, client, lock, 30*time.Second)
		}
		if tt.status == 200 && out.Response.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: headers %v", name, out.Response.Header)
		}
	}
}

// With WriteResponse a system that reads status and response finds both.
func TestWriteResponse(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{WriteResponse: true})
	c := driver.NewClaim(key, fp)
	begin(t, s, c)
	must(t, s.Complete(t.Context(), c, driver.Response{Status: 201, Body: []byte(`{"id":1}`)}))
	if fields := hash(t, client, "idempotency:"+string(key)); fields["status"] != "completed" || fields["response"] != `{"id":1}` {
		t.Errorf("record %v", fields)
	}
	if out := begin(t, s, driver.NewClaim(key, fp)); out.Response.Status != 201 || string(out.Response.Body) != `{"id":1}` {
		t.Errorf("Begin = %+v", out)
	}
}

// A processing record counts only while the lock holds its token.
func TestProcessingEndsWithItsLock(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	first := driver.NewClaim(key, fp)
	begin(t, s, first)
	client.Del(t.Context(), "idempotency:lock:"+string(key))
	if err := s.Complete(t.Context(), first, driver.Response{Status: 200}); !errors.Is(err, idempotency.ErrLeaseLost) {
		t.Errorf("Complete without the lock = %v; want ErrLeaseLost", err)
	}
	second := driver.NewClaim(key, driver.FingerprintOf("other"))
	if out := begin(t, s, second); out.State != driver.Acquired {
		t.Errorf("Begin without the lock = %+v", out)
	}
	if err := s.Complete(t.Context(), first, driver.Response{Status: 200}); err == nil {
		t.Error("the first run completed the second one's record")
	}
	client.Set(t.Context(), "idempotency:lock:"+string(key), "a third", time.Minute)
	if out := begin(t, s, first); out.State != driver.InProgress || out.Fingerprint != (driver.Fingerprint{}) {
		t.Errorf("Begin below a lock of another run = %+v", out)
	}
}

func TestWrongTypes(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	client.Set(t.Context(), "idempotency:"+string(key), "text", 0)
	_, err := s.Begin(t.Context(), driver.NewClaim(key, fp))
	if err == nil || !strings.Contains(err.Error(), "another type") {
		t.Errorf("record is a string: %v", err)
	}
	client.Del(t.Context(), "idempotency:"+string(key))
	client.SAdd(t.Context(), "idempotency:lock:"+string(key), "x")
	c := driver.NewClaim(key, fp)
	_, err = s.Begin(t.Context(), c)
	if err == nil || !strings.Contains(err.Error(), "another type") {
		t.Errorf("lock is a set: %v", err)
	}
	if err := s.Complete(t.Context(), c, driver.Response{}); err == nil || !strings.Contains(err.Error(), "another type") {
		t.Errorf("lock is a set: %v", err)
	}
}

func TestUnknownStatus(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record := "idempotency:" + string(key)
	client.HSet(t.Context(), record, "status", "done", "response", "secret")
	out, err := s.Begin(t.Context(), driver.NewClaim(key, fp))
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("Begin = %+v, %v; want an error", out, err)
	}
	if fields := hash(t, client, record); fields["status"] != "done" || fields["response"] != "secret" {
		t.Errorf("the record was changed to %v", fields)
	}
}

func TestRoundTrips(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	run := func(k driver.Key) {
		c := driver.NewClaim(k, fp)
		if begin(t, s, c).State == driver.Acquired {
			must(t, s.Complete(t.Context(), c, driver.Response{Status: 200}))
		}
	}
	run(driver.Key(idempotency.NewKey())) // the server may need to load the scripts
	hook := &trips{}
	client.AddHook(hook)
	run(key)
	if n := hook.n.Swap(0); n != 2 {
		t.Errorf("first run: %d round trips, want 2", n)
	}
	run(key)
	if n := hook.n.Load(); n != 1 {
		t.Errorf("replay: %d round trips, want 1", n)
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	if _, err := idempotencyredis.New(nil, idempotencyredis.Config{}); err == nil {
		t.Error("no client: no error")
	}
	client := single(&names{})
	defer func() { _ = client.Close() }()
	_, err := idempotencyredis.New(client, idempotencyredis.Config{Prefix: "{x}", Lease: time.Nanosecond, Retention: -1})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{"Prefix", "Lease", "Retention"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("error does not name %s: %v", field, err)
		}
	}
}

func TestServerDown(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Dialer: nowhere, MaxRetries: -1})
	defer func() { _ = client.Close() }()
	s, c := newStore(t, client, idempotencyredis.Config{}), driver.NewClaim(key, fp)
	_, err := s.Begin(t.Context(), c)
	for what, err := range map[string]error{
		"Begin": err, "Extend": s.Extend(t.Context(), c), "Release": s.Release(t.Context(), c),
		"Complete": s.Complete(t.Context(), c, driver.Response{Status: 200}),
	} {
		if err == nil || strings.Contains(err.Error(), string(key)) {
			t.Errorf("%s = %v; want an error without the key", what, err)
		}
	}
	if err := s.Check(t.Context()); err == nil {
		t.Error("Check of a server that is down: no error")
	}
}

// Check reports a server that evicts keys when it is full.
func TestCheck(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string]int{"noeviction": 0, "allkeys-lru": 1} {
		server := testenv.Private(t, testenv.Redis, "--maxmemory", "100mb", "--maxmemory-policy", policy)
		err := newStore(t, redistest.Client(t, server.URL()), idempotencyredis.Config{}).Check(t.Context())
		findings := findingsOf(err)
		if len(findings) != want {
			t.Errorf("%s: %v; want %d findings", policy, err, want)
		}
		for _, f := range findings {
			if text := f.Error(); !strings.Contains(text, "idempotencyredis") || !strings.Contains(text, policy) || !strings.Contains(f.Fix(), "noeviction") {
				t.Errorf("finding %v", f)
			}
		}
	}
}

// If the lock holds only a token, the processing record with that token has the fingerprint.
func TestProcessingRecordsOfOtherSystems(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record, lock := "idempotency:"+string(key), "idempotency:lock:"+string(key)
	asked := driver.FingerprintOf("the other system's request")
	fields := map[string]any{"status": "processing", "token": "theirs", "fpv": asked.Version, "fp": asked.Sum}
	for holder, want := range map[string]driver.Fingerprint{
		"theirs":      asked,
		"a later one": {},
		"host:1:abc":  {},
		"":            {},
	} {
		client.Del(t.Context(), record, lock)
		client.HSet(t.Context(), record, fields)
		client.Set(t.Context(), lock, holder, time.Minute)
		out := begin(t, s, driver.NewClaim(key, fp))
		if out.State != driver.InProgress || out.Fingerprint != want || out.Lease > time.Minute || out.Lease < 50*time.Second {
			t.Errorf("lock %q: %+v, want in progress with fingerprint %+v", holder, out, want)
		}
	}
	client.Del(t.Context(), lock)
	if out := begin(t, s, driver.NewClaim(key, fp)); out.State != driver.Acquired || hash(t, client, record)["token"] == "theirs" {
		t.Errorf("no lock: %+v, or the old record is still there", out)
	}
}

// A fingerprint is compared even if its version is unreadable: the answer of one caller is not for another.
func TestFingerprintWithoutAVersion(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	for _, version := range []string{"", "x", "99999999999999999999"} {
		client.HSet(t.Context(), "idempotency:"+string(key), "status", "completed", "code", "200", "fp", fp.Sum, "fpv", version)
		out := begin(t, s, driver.NewClaim(key, fp))
		if fp.Conflicts(out.Fingerprint) || !driver.FingerprintOf("another").Conflicts(out.Fingerprint) {
			t.Errorf("version %q: %+v", version, out)
		}
	}
}

// A record of another system is read up to a limit. A larger record means that the work was done without a kept
// response.
func TestHugeRecords(t *testing.T) {
	t.Parallel()
	const limit = 64 << 20
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record := "idempotency:" + string(key)
	fields := []string{"response", "hdr", "fp"}
	if os.Getenv(testenv.NightlyVar) == "1" { // each record has 64 MiB
		fields = append(fields, "body", "code", "fpv")
	}
	for _, field := range fields {
		client.Del(t.Context(), record)
		fields := map[string]any{"status": "completed", "code": 200, field: strings.Repeat("x", limit+1)}
		if field == "response" {
			delete(fields, "code")
		}
		must(t, client.HSet(t.Context(), record, fields).Err())
		var out driver.BeginResult
		testenv.Eventually(t, func() (err error) { // a busy server may need longer than 6 s
			out, err = s.Begin(t.Context(), driver.NewClaim(key, fp))
			return err
		})
		if len(out.Response.Body)+len(out.Fingerprint.Sum) > 1000 {
			t.Errorf("%s: a body of %d bytes and a fingerprint of %d were read", field, len(out.Response.Body), len(out.Fingerprint.Sum))
		}
		switch field {
		case "fp": // the fingerprint of another request
			if !fp.Conflicts(out.Fingerprint) {
				t.Errorf("a fingerprint of %d bytes fits", limit)
			}
		case "fpv": // the response is readable
		default:
			if out.State != driver.Completed || !out.Response.Unavailable() {
				t.Errorf("%s: state %v, status %d", field, out.State, out.Response.Status)
			}
		}
	}
}

// A token holds nothing if it is a prefix of the holder's token, or could be parsed as more than a token.
func TestTokensAreComparedWhole(t *testing.T) {
	t.Parallel()
	s := newStore(t, redistest.New(t), idempotencyredis.Config{})
	c := driver.Claim{Key: key, Token: "abc", Fingerprint: fp}
	begin(t, s, c)
	for _, token := range []string{"", "ab", "abcd", "abc:1", "bc"} {
		other := c
		other.Token = token
		if err := s.Extend(t.Context(), other); err == nil {
			t.Errorf("%q extended the lease of %q", token, c.Token)
		}
		if err := s.Complete(t.Context(), other, driver.Response{Status: 200}); err == nil {
			t.Errorf("%q completed the run of %q", token, c.Token)
		}
		if err := s.Release(t.Context(), other); err == nil {
			t.Errorf("%q released the lease of %q", token, c.Token)
		}
	}
}

// A system that does not compare tokens may complete a key that it has lost. It may have sent its answer already, so
// that answer stays, in full.
func TestCompletedByAnotherSystemMeanwhile(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	c := driver.NewClaim(key, fp)
	begin(t, s, c)
	record := "idempotency:" + string(key)
	theirs := map[string]any{"status": "completed", "response": "theirs"}
	must(t, client.HSet(t.Context(), record, theirs).Err())
	before := hash(t, client, record)
	client.Expire(t.Context(), record, time.Hour)
	if err := s.Extend(t.Context(), c); err != nil {
		t.Error(err)
	}
	ends(t, client, record, time.Hour)
	if err := s.Complete(t.Context(), c, driver.Response{Status: 201}); !errors.Is(err, idempotency.ErrLeaseLost) {
		t.Errorf("Complete = %v; want ErrLeaseLost", err)
	}
	if out := begin(t, s, driver.NewClaim(key, fp)); out.State != driver.Completed || string(out.Response.Body) != "theirs" {
		t.Errorf("Begin = %+v; want their answer", out)
	}
	if err := s.Release(t.Context(), c); err != nil {
		t.Error(err)
	}
	if fields := hash(t, client, record); !maps.Equal(fields, before) {
		t.Errorf("the record was changed from %v to %v", before, fields)
	}
}

// Look returns the readable fields of another system's records, and an error for an unknown status.
func TestLookAtRecordsOfOtherSystems(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record, lock := "idempotency:"+string(key), "idempotency:lock:"+string(key)
	client.Set(t.Context(), lock, "host:1:abc", time.Minute)
	known, err := s.Look(t.Context(), key)
	if err != nil || known.State != driver.InProgress || known.Left < 50*time.Second || !known.Since.IsZero() || known.Fingerprint.Sum != "" {
		t.Errorf("a lock alone: %+v, %v", known, err)
	}
	client.Del(t.Context(), lock)
	client.HSet(t.Context(), record, "status", "completed", "response", `{"id":1}`, "created", "yesterday")
	known, err = s.Look(t.Context(), key)
	if err != nil || known.State != driver.Completed || known.Left != 0 || !known.Since.IsZero() || string(known.Response.Body) != `{"id":1}` {
		t.Errorf("a record without an end: %+v, %v", known, err)
	}
	client.HSet(t.Context(), record, "status", "archived")
	if known, err := s.Look(t.Context(), key); err == nil || known.State != 0 {
		t.Errorf("a record of another status: %+v, %v", known, err)
	}
}

// A cluster client that never connects shows the names by the slots that it requests.
func TestKeyNames(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		client func(hook redis.Hook) redis.UniversalClient
		cfg    idempotencyredis.Config
		key    driver.Key
		want   []string
	}{
		"literal": {
			single,
			idempotencyredis.Config{},
			key,
			[]string{"idempotency:" + string(key), "idempotency:lock:" + string(key)},
		},
		"prefix": {
			single,
			idempotencyredis.Config{Prefix: "app:idem"},
			key,
			[]string{"app:idem:" + string(key), "app:idem:lock:" + string(key)},
		},
		"scope": {
			single,
			idempotencyredis.Config{},
			driver.Key(idempotency.Key(key).In("{a}:b")),
			[]string{"idempotency:@%7Ba%7D%3Ab:" + string(key), "idempotency:lock:@%7Ba%7D%3Ab:" + string(key)},
		},
		"asked for": {
			single,
			idempotencyredis.Config{HashTag: true},
			key,
			[]string{"idempotency:{" + string(key) + "}", "idempotency:lock:{" + string(key) + "}"},
		},
		"cluster": {
			cluster,
			idempotencyredis.Config{},
			driver.Key(idempotency.Key(key).In("a")),
			[]string{"idempotency:{@a:" + string(key) + "}", "idempotency:lock:{@a:" + string(key) + "}"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hook := &names{}
			client := tt.client(hook)
			defer func() { _ = client.Close() }()
			s := newStore(t, client, tt.cfg)
			_, _ = s.Begin(t.Context(), driver.NewClaim(tt.key, fp))
			if strings.Join(hook.keys, " ") != strings.Join(tt.want, " ") {
				t.Errorf("keys %q, want %q", hook.keys, tt.want)
			}
		})
	}
}

func nowhere(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed }

func single(hook redis.Hook) redis.UniversalClient {
	c := redis.NewClient(&redis.Options{Dialer: nowhere})
	c.AddHook(hook)
	return c
}

func cluster(hook redis.Hook) redis.UniversalClient {
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"nowhere:1"}, Dialer: nowhere})
	c.AddHook(hook)
	return c
}

// names records the keys of a script and sends nothing.
type names struct {
	trips
	keys []string
}

func (h *names) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); len(args) > 4 && args[0] == "evalsha" {
			h.keys = []string{args[3].(string), args[4].(string)}
		}
		cmd.SetErr(net.ErrClosed)
		return net.ErrClosed
	}
}

// backend gives all subtests stores on one client: keys are random. names returns the Redis names of a key's record
// and lock.
func backend(client redis.UniversalClient, cfg idempotencyredis.Config, names func(driver.Key) []string) conformance.Backend {
	return conformance.Backend{
		New: func(t *testing.T) driver.Store { return newStore(t, client, cfg) },
		Pass: func(t *testing.T, key driver.Key, d time.Duration) {
			t.Helper()
			for _, name := range names(key) {
				ttl, err := client.PTTL(t.Context(), name).Result()
				if err == nil && ttl > 0 { // an expiry in the past deletes the key
					err = client.PExpire(t.Context(), name, ttl-d).Err()
				}
				if err != nil {
					t.Error(err)
				}
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(redistest.New(t), idempotencyredis.Config{}, func(key driver.Key) []string {
		return []string{"idempotency:" + string(key), "idempotency:lock:" + string(key)}
	}))
}

func TestStoreOnCluster(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "TestStore runs the same scripts; TestCluster covers the differences of a cluster")
	client, _ := redistest.Cluster(t)
	prefix := "test:" + rand.Text()
	conformance.TestStore(t, backend(client, idempotencyredis.Config{Prefix: prefix}, func(key driver.Key) []string {
		return []string{prefix + ":{" + string(key) + "}", prefix + ":lock:{" + string(key) + "}"}
	}))
}

// TestCluster uses one cluster for all subtests, because three servers take seconds to agree.
func TestCluster(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	t.Run("keys are on all nodes", func(t *testing.T) {
		s := newStore(t, client, idempotencyredis.Config{})
		for range 60 {
			c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
			begin(t, s, c)
			if err := s.Complete(t.Context(), c, driver.Response{Status: 201}); err != nil {
				t.Error(err)
			}
		}
		if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
			t.Errorf("%d nodes hold keys, %v; want 3", used, err)
		}
		if err := s.Check(t.Context()); err != nil {
			t.Errorf("Check = %v", err)
		}
	})
	t.Run("claims in flight", func(t *testing.T) { testInFlightOfNodes(t, client) })
	t.Run("a slot moves during a run", func(t *testing.T) { testSlotMovesDuringARun(t, client, servers) })
	t.Run("a silent node", func(t *testing.T) { testSilentNode(t, client, servers) })
}

// While a key's two names are on different nodes, no script can run on them. That does not lose the result of a run.
func testSlotMovesDuringARun(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	s := newStore(t, client, idempotencyredis.Config{})
	move := redistest.NewMove(t, client, servers, "{"+string(key)+"}")
	moved := make(chan error, 1)
	got, _, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(ctx context.Context) (int, error) {
		err := move.Begin(ctx)
		time.AfterFunc(300*time.Millisecond, func() { moved <- errors.Join(move.Keys(t.Context()), move.End(t.Context())) }) // timing: the keys move while the call waits
		return 7, err
	})
	if err := errors.Join(err, <-moved); err != nil || got != 7 {
		t.Fatalf("Do = %d, %v", got, err)
	}
	got, replayed, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(context.Context) (int, error) { return 8, nil })
	if err != nil || !replayed || got != 7 {
		t.Errorf("again: %d, %v, %v", got, replayed, err)
	}
}

// Only connections to the node that was silent are tested.
func testSilentNode(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	testenv.Nightly(t, "it waits for a silent cluster")
	s := newStore(t, client, idempotencyredis.Config{})
	for range 60 { // connects to every node
		if _, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Fatal(err)
		}
	}
	tested := make(testedKeys, 1000)
	client.AddHook(tested)
	for _, server := range servers {
		must(t, server.Pause())
	}
	claim := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
	if _, err := s.Begin(t.Context(), claim); err == nil {
		t.Error("a silent cluster answered")
	}
	for _, server := range servers {
		must(t, server.Resume())
	}
	select {
	case name := <-tested:
		if !strings.Contains(name, "{"+string(claim.Key)+"}") {
			t.Errorf("tested with the key %q", name)
		}
	case <-time.After(testenv.Patience):
		t.Error("no connection was tested")
	}
}

// testedKeys receives the keys of the commands that test idle connections.
type testedKeys chan string

func (h testedKeys) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h testedKeys) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h testedKeys) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "mget" {
			h <- cmd.Args()[1].(string)
		}
		return next(ctx, cmd)
	}
}

// A replica that has taken over accepts keys, even if nobody redirects the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a replica takes seconds to take over")
	client, failOver := redistest.Failover(t)
	s := newStore(t, client, idempotencyredis.Config{})
	begin := func() error {
		_, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
		return err
	}
	must(t, begin())
	failOver()
	testenv.Eventually(t, begin)
}

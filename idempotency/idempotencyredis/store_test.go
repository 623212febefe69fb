package idempotencyredis_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const key = driver.Key("a0eebc999c0b4ef8bb6d6bb9bd380a11")

var fp = driver.FingerprintOf("request")

func begin(t *testing.T, s *idempotencyredis.Store, c driver.Claim) driver.BeginResult {
	t.Helper()
	out, err := s.Begin(t.Context(), c)
	must(t, err)
	return out
}

func hash(t *testing.T, client *redis.Client, name string) map[string]string {
	t.Helper()
	fields, err := client.HGetAll(t.Context(), name).Result()
	must(t, err)
	return fields
}

// ends checks a TTL that was set a moment ago: less is only what a busy machine takes.
func ends(t *testing.T, client *redis.Client, name string, want time.Duration) {
	t.Helper()
	if ttl, err := client.PTTL(t.Context(), name).Result(); err != nil || ttl > want || ttl < want-15*time.Second {
		t.Errorf("TTL of %s is %v, %v; want %v", name, ttl, err, want)
	}
}

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
			client.Set(t.Context(), lock, tt.lock, 0) // without an end, as a crash between two commands leaves it
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

// trips counts commands on their way to the server.
type trips struct{ n atomic.Int64 }

func (*trips) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *trips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.n.Add(1)
		return next(ctx, cmd)
	}
}

func (*trips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
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
	run(driver.Key(idempotency.NewKey())) // the server may have to be taught the scripts
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

// Check tells of a server that drops keys when it is full.
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
			if text := f.Error(); !strings.Contains(text, "idempotencyredis") || !strings.Contains(text, policy) || !strings.Contains(f.Mend(), "noeviction") {
				t.Errorf("finding %v", f)
			}
		}
	}
}

type finding interface {
	error
	Mend() string
}

// findingsOf returns the findings that Check has joined.
func findingsOf(err error) (all []finding) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	for _, err := range joined.Unwrap() {
		if f, ok := err.(finding); ok {
			all = append(all, f)
		}
	}
	return all
}

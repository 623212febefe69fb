package idempotencyredis_test

import (
	"errors"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Where the lock holds a token only, the processing record of that token tells
// what it was asked.
func TestProcessingRecordsOfOtherSystems(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record, lock := "idempotency:"+string(key), "idempotency:lock:"+string(key)
	asked := driver.FingerprintOf("what the other system was asked")
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

// A fingerprint counts also where its version cannot be read: the answer of one
// caller is not for another.
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

// What another system has stored is read up to a bound: beyond it the work was done,
// and its response is not there.
func TestHugeRecords(t *testing.T) {
	t.Parallel()
	const limit = 64 << 20
	client := redistest.New(t)
	s := newStore(t, client, idempotencyredis.Config{})
	record := "idempotency:" + string(key)
	fields := []string{"response", "hdr", "fp"}
	if os.Getenv(testenv.NightlyVar) == "1" { // each is a record of 64 MiB
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
		testenv.Eventually(t, func() (err error) { // a busy server may need longer than its 6 s
			out, err = s.Begin(t.Context(), driver.NewClaim(key, fp))
			return err
		})
		if len(out.Response.Body)+len(out.Fingerprint.Sum) > 1000 {
			t.Errorf("%s: a body of %d bytes and a fingerprint of %d were read", field, len(out.Response.Body), len(out.Fingerprint.Sum))
		}
		switch field {
		case "fp": // another request's
			if !fp.Conflicts(out.Fingerprint) {
				t.Errorf("a fingerprint of %d bytes fits", limit)
			}
		case "fpv": // the response is there
		default:
			if out.State != driver.Completed || !out.Response.Unavailable() {
				t.Errorf("%s: state %v, status %d", field, out.State, out.Response.Status)
			}
		}
	}
}

// A token that another one begins with, or that could be mistaken for more than
// a token, holds nothing.
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

// A system that does not compare tokens may complete a key that it has lost. Its
// answer may have been given already, so it stays the answer, whole.
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

// A look tells of another system's records what is in them, and nothing of what may mean anything.
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

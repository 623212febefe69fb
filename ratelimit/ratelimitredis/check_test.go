package ratelimitredis_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if err := open(t, client, ratelimitredis.Config{}).Check(t.Context()); err != nil {
		t.Error(err)
	}
	if err := open(t, impatient(t, "127.0.0.1:1", 0), ratelimitredis.Config{}).Check(t.Context()); err == nil || hasMend(err) {
		t.Errorf("of a server that is not there it says %v", err)
	}
}

func TestCheckFindsWhatDecisionsWouldMeet(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis, redistest.ClusterFlags...).URL()) // it does not show that it is of a cluster
	if err := client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error { return open(t, client, ratelimitredis.Config{Tag: "rl"}).Check(t.Context()) })
	err := open(t, client, ratelimitredis.Config{}).Check(t.Context())
	if mend := findings(t, err, 1)[0].Mend(); !strings.Contains(mend, "Tag") {
		t.Errorf("without a tag on a cluster: %v is mended by %q", err, mend)
	}
	if err := client.ACLSetUser(t.Context(), "weak", "on", ">secret", "~*", "+@all", "-evalsha", "-eval").Err(); err != nil {
		t.Fatal(err)
	}
	opts := *client.Options()
	opts.Username, opts.Password = "weak", "secret"
	weak := redis.NewClient(&opts)
	defer func() {
		if err := weak.Close(); err != nil {
			t.Error(err)
		}
	}()
	err = open(t, weak, ratelimitredis.Config{Tag: "rl"}).Check(t.Context())
	if mend := findings(t, err, 1)[0].Mend(); !strings.Contains(mend, "EVALSHA") {
		t.Errorf("a user who may not run scripts: %v is mended by %q", err, mend)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory", "100mb").Err(); err != nil {
		t.Fatal(err)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	err = open(t, client, ratelimitredis.Config{Tag: "rl"}).Check(t.Context())
	if found := findings(t, err, 1)[0]; !strings.Contains(found.Error(), "allkeys-lru") {
		t.Errorf("with eviction: %v", found)
	}
}

// finding is what a finding of Check has, unlike a failure to look.
type finding interface {
	error
	Mend() string
}

// findings returns the findings of a Check, which are this many.
func findings(t *testing.T, err error, count int) (found []finding) {
	t.Helper()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("%v is no list of findings", err)
	}
	for _, each := range joined.Unwrap() {
		if f, ok := each.(finding); ok {
			found = append(found, f)
		} else {
			t.Errorf("%v has no mend", each)
		}
	}
	if len(found) != count {
		t.Fatalf("%d findings, want %d: %v", len(found), count, err)
	}
	return found
}

func hasMend(err error) bool {
	_, ok := errors.AsType[finding](err)
	return ok
}

// A server may keep its configuration to itself; one that does not answer is reported.
func TestCheckWithoutConfiguration(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if err := open(t, redistest.Configless(client, redistest.Refusal("NOPERM")), ratelimitredis.Config{}).Check(t.Context()); err != nil {
		t.Errorf("refused: %v", err)
	}
	if err := open(t, redistest.Configless(client, io.ErrUnexpectedEOF), ratelimitredis.Config{}).Check(t.Context()); !errors.Is(err, io.ErrUnexpectedEOF) || hasMend(err) {
		t.Errorf("without an answer: %v", err)
	}
}

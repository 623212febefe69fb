package faults_test

import (
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// atEveryStep sends one request for each step that a request takes, with the fault at that step,
// and verifies what came of it. before runs before each request.
func (s *stack) atEveryStep(t *testing.T, before, fault func()) {
	t.Helper()
	s.steps.fault = fault
	stride := 1
	if !long(t) {
		stride = 2 // of two neighbours one is before a write and one after it, or an answer
	}
	struck := 0
	for at := 1; ; at += stride {
		if before != nil {
			before()
		}
		key, answer := idempotency.NewKey(), ""
		testenv.Eventually(t, s.warm) // the servers answer, and the clients have connections that work
		s.steps.arm(at)
		rec := s.post(key)
		n := s.steps.disarm()
		if rec.Code == 201 {
			answer = rec.Body.String()
		}
		s.verify(t, fmt.Sprint("fault at step ", at), key, answer)
		if n < at {
			break
		}
		struck++
	}
	if t.Logf("%d faults", struck); struck < 4 {
		t.Error("a request takes more steps than that")
	}
}

func TestIdempotencyRedisFaults(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(t *testing.T, server *testenv.Server) func(){
		"killed": func(t *testing.T, server *testenv.Server) func() { // it keeps nothing
			return func() {
				must(t, server.Kill())
				must(t, server.Start(t.Context()))
			}
		},
		"flushed": func(t *testing.T, server *testenv.Server) func() {
			admin := redistest.Client(t, server.URL())
			return func() { must(t, admin.FlushAll(t.Context()).Err()) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := testenv.Private(t, testenv.Redis)
			job := stackJob{Database: pgtest.URL(t), Redis: server.URL(), Gate: redisGate}
			migrateStack(t, job.Database)
			s, err := openStack(t.Context(), job, nil)
			must(t, err)
			t.Cleanup(s.close)
			s.atEveryStep(t, nil, fault(t, server))
		})
	}
}

// A primary is replaced by a replica that has not heard of the request yet.
func TestIdempotencyRedisFailedOver(t *testing.T) {
	t.Parallel()
	f := &failover{t: t}
	for i := range f.nodes {
		f.nodes[i] = redistest.Client(t, testenv.Private(t, testenv.Redis, "--repl-diskless-sync-delay", "0").URL())
	}
	job := stackJob{Database: pgtest.URL(t), Redis: "redis://" + f.address(), Gate: redisGate}
	migrateStack(t, job.Database)
	s, err := openStack(t.Context(), job, f.address)
	must(t, err)
	t.Cleanup(s.close)
	s.atEveryStep(t, f.sync, f.strike)
}

type failover struct {
	t       *testing.T
	nodes   [2]*redis.Client
	primary atomic.Int32
}

func (f *failover) address() string { return f.nodes[f.primary.Load()].Options().Addr }

// sync gives the replica what the primary has, and ends the replication: what comes now is lost.
func (f *failover) sync() {
	f.t.Helper()
	primary, replica := f.nodes[f.primary.Load()], f.nodes[1-f.primary.Load()]
	u, err := url.Parse("redis://" + primary.Options().Addr)
	must(f.t, err)
	must(f.t, replica.ReplicaOf(f.t.Context(), u.Hostname(), u.Port()).Err())
	testenv.Eventually(f.t, func() error {
		info, err := replica.Info(f.t.Context(), "replication").Result()
		if err == nil && !strings.Contains(info, "master_link_status:up") {
			err = fmt.Errorf("not in sync: %s", info)
		}
		return err
	})
	must(f.t, replica.ReplicaOf(f.t.Context(), "NO", "ONE").Err())
}

func (f *failover) strike() {
	old := f.nodes[f.primary.Load()]
	f.primary.Store(1 - f.primary.Load())
	if err := old.ClientKillByFilter(f.t.Context(), "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
		f.t.Error(err)
	}
}

// Postgres is killed and recovers, or is shut down and started, at every step.
func TestIdempotencyPostgresRestarted(t *testing.T) {
	t.Parallel()
	for _, gate := range []string{redisGate, postgresGate} {
		t.Run(gate, func(t *testing.T) {
			t.Parallel()
			server := testenv.Private(t, testenv.Postgres)
			job := stackJob{Database: server.URL(), Redis: redistest.URL(t), Gate: gate}
			migrateStack(t, job.Database)
			s, err := openStack(t.Context(), job, nil)
			must(t, err)
			t.Cleanup(s.close)
			kill := false
			s.atEveryStep(t, nil, func() {
				if kill = !kill; kill {
					must(t, server.Kill())
				}
				must(t, server.Restart(t.Context()))
			})
		})
	}
}

package faults_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// All connections to one server fall silent, at every step of a request: half-open, while new ones
// are served. The request is answered, and takes effect once.
func TestIdempotencySilentConnections(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		gate  string
		redis bool // that is what falls silent, else Postgres
	}{
		"the gate":                    {redisGate, true},
		"the records":                 {redisGate, false},
		"gate and records, one table": {postgresGate, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			job := stackJob{Database: pgtest.URL(t), Redis: redistest.URL(t), Gate: tt.gate}
			migrateStack(t, job.Database)
			var proxy *testenv.Proxy
			if tt.redis {
				proxy = testenv.NewProxy(t, job.Redis)
				job.Redis = proxy.Rewrite(job.Redis)
			} else {
				proxy = testenv.NewProxy(t, job.Database)
				job.Database = proxy.Rewrite(job.Database)
			}
			s, err := openStack(t.Context(), job, nil)
			must(t, err)
			t.Cleanup(s.close)
			t.Cleanup(proxy.Cut) // before s is closed
			s.atEveryStep(t, nil, proxy.SilenceConnections)
		})
	}
}

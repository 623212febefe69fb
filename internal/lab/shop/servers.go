package shop

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// Servers are the addresses of what a shop stands on.
type Servers struct{ Database, Redis, Broker string }

// Shared returns a corner of each shared server.
func Shared(t testing.TB) Servers {
	t.Helper()
	return Servers{pgtest.URL(t), redistest.URL(t), amqptest.New(t).URL}
}

// Env is how a shop with -backend=services learns of them.
func (s Servers) Env() []string {
	return []string{"DATABASE_URL=" + s.Database, "REDIS_URL=" + s.Redis, "AMQP_URL=" + s.Broker}
}

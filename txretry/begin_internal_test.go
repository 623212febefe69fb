package txretry

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestBeginMessage(t *testing.T) {
	t.Parallel()
	for want, key := range map[string]beginKey{
		"begin isolation level read committed": {isolation: pgx.ReadCommitted},
		"begin isolation level serializable read only; set local lock_timeout = '8000ms'": {
			isolation: pgx.Serializable, readOnly: true, lockTimeout: 8 * time.Second,
		},
		"begin isolation level serializable; set local lock_timeout = '1ms'; set local statement_timeout = '2ms'; " +
			"set local idle_in_transaction_session_timeout = '3ms'; select pg_current_xact_id()": {
			isolation: pgx.Serializable, wantsXID: true, lockTimeout: time.Millisecond, statementTimeout: 1001 * time.Microsecond,
			idleTimeout: 3 * time.Millisecond,
		},
	} {
		if spec := key.spec(); spec.SQL != want || spec.WantsXID != key.wantsXID {
			t.Errorf("%+v: %+v", key, spec)
		}
	}
}

// A caller that computes its timeouts does not fill the memory.
func TestBeginCacheIsBounded(t *testing.T) {
	t.Parallel()
	var c beginCache
	for i := range 10 * maxBeginCache {
		c.spec(beginKey{isolation: pgx.Serializable, lockTimeout: time.Duration(i) * time.Second})
	}
	if len(c.specs) != maxBeginCache {
		t.Errorf("%d messages are remembered", len(c.specs))
	}
}

package txretry

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// maxBeginCache bounds the memory of a caller that computes its timeouts.
const maxBeginCache = 64

// beginKey is the part of Options that shapes the begin message.
type beginKey struct {
	isolation                     pgx.TxIsoLevel
	readOnly, deferrable          bool
	lockTimeout, statementTimeout time.Duration
}

// beginCache renders each begin message once.
type beginCache struct {
	mu    sync.RWMutex
	specs map[beginKey]session.Spec
}

func (c *beginCache) spec(o Options) session.Spec {
	key := beginKey{o.Isolation, o.ReadOnly, o.Deferrable, o.LockTimeout, o.StatementTimeout}
	c.mu.RLock()
	spec, ok := c.specs[key]
	c.mu.RUnlock()
	if ok {
		return spec
	}
	spec = session.Spec{SQL: key.sql(), ReadOnly: key.readOnly}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.specs) < maxBeginCache {
		if c.specs == nil {
			c.specs = make(map[beginKey]session.Spec)
		}
		c.specs[key] = spec
	}
	return spec
}

// sql renders one message, so that the settings cost no round trip of their
// own. All of its parts are validated: no text of a user gets into it.
func (k beginKey) sql() string {
	var b strings.Builder
	b.WriteString("begin isolation level ")
	b.WriteString(string(k.isolation))
	if k.readOnly {
		b.WriteString(" read only")
	}
	if k.deferrable {
		b.WriteString(" deferrable")
	}
	writeTimeout(&b, "lock_timeout", k.lockTimeout)
	writeTimeout(&b, "statement_timeout", k.statementTimeout)
	return b.String()
}

func writeTimeout(b *strings.Builder, name string, d time.Duration) {
	if d == 0 {
		return
	}
	ms := (d + time.Millisecond - 1) / time.Millisecond
	b.WriteString("; set local ")
	b.WriteString(name)
	b.WriteString(" = '")
	b.WriteString(strconv.FormatInt(int64(ms), 10))
	b.WriteString("ms'")
}

package txretry

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// maxBeginCache bounds the memory of a caller that computes its timeouts.
const maxBeginCache = 64

// beginKey is the part of Options that shapes the begin message.
type beginKey struct {
	isolation          pgx.TxIsoLevel
	readOnly, wantsXID bool

	lockTimeout, statementTimeout, idleTimeout time.Duration
}

// spec returns the begin message of a call.
func (c *call) spec() *driver.Spec { return c.m.begin.spec(c.beginKey()) }

func (c *call) beginKey() beginKey {
	o := &c.opts
	wantsXID := c.m.cfg.XactStatus && o.Witness == nil && !o.ReadOnly
	return beginKey{o.Isolation, o.ReadOnly, wantsXID, o.LockTimeout, o.StatementTimeout, o.IdleTimeout}
}

// beginCache renders each begin message once.
type beginCache struct {
	mu    sync.RWMutex
	specs map[beginKey]*driver.Spec
}

func (c *beginCache) spec(key beginKey) *driver.Spec {
	c.mu.RLock()
	spec, ok := c.specs[key]
	c.mu.RUnlock()
	if ok {
		return spec
	}
	spec = key.spec()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.specs) < maxBeginCache {
		if c.specs == nil {
			c.specs = make(map[beginKey]*driver.Spec)
		}
		c.specs[key] = spec
	}
	return spec
}

// spec renders one message, so that the settings cost no round trip of their
// own. All of its parts are validated: no text of a user gets into it.
func (k beginKey) spec() *driver.Spec {
	begin := "begin isolation level " + string(k.isolation)
	if k.readOnly {
		begin += " read only"
	}
	parts := []string{begin}
	parts = appendTimeout(parts, "lock_timeout", k.lockTimeout)
	parts = appendTimeout(parts, "statement_timeout", k.statementTimeout)
	parts = appendTimeout(parts, "idle_in_transaction_session_timeout", k.idleTimeout)
	if k.wantsXID {
		parts = append(parts, "select pg_current_xact_id()")
	}
	return &driver.Spec{SQL: strings.Join(parts, "; "), Parts: parts, ReadOnly: k.readOnly, WantsXID: k.wantsXID}
}

func appendTimeout(parts []string, name string, d time.Duration) []string {
	if d <= 0 {
		return parts
	}
	ms := (d + time.Millisecond - 1) / time.Millisecond
	return append(parts, "set local "+name+" = '"+strconv.FormatInt(int64(ms), 10)+"ms'")
}

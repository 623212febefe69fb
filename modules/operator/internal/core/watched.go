package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// claimsStatus are the idempotency keys that are in flight.
type claimsStatus struct {
	Part     string `json:"part"`
	InFlight int    `json:"in_flight"`
	// Estimated says that the part has more keys than it went through.
	Estimated bool   `json:"estimated,omitempty"`
	Error     string `json:"error,omitempty"`
	hidden    bool   // the program has no right to count them, or its client no way
}

// Count is how many are in flight.
func (c claimsStatus) Count() string {
	if c.Estimated {
		return fmt.Sprintf("~%d", c.InFlight)
	}
	return fmt.Sprint(c.InFlight)
}

// connectionsStatus are the connections to a server.
type connectionsStatus struct {
	Server string                 `json:"server"`
	Most   int                    `json:"most"` // that the server takes; 0: it does not tell
	Open   int                    `json:"open"`
	Roles  []operator.Connections `json:"roles"`
	Error  string                 `json:"error,omitempty"`
}

// counting is a part that tells how many claims are in flight, and whether it has counted all.
type counting interface {
	InFlight(ctx context.Context) (n int, exact bool, err error)
}

const (
	// countRest is for how many times as long as a count of claims took none follows: Redis goes through its keys for it, and
	// requests wait for the same Redis.
	countRest = 100
	// maxCountRest bounds that.
	maxCountRest = time.Minute
)

// claimsCount is the last count of a part's claims.
type claimsCount struct {
	mu   sync.Mutex
	last claimsStatus
	next time.Time // before which it is not counted anew
}

// look counts the claims of a part, or tells the last count where that is young. On Redis a user may have no right to the
// commands that count, and a client may not know the nodes of its cluster.
func (c *claimsCount) look(ctx context.Context, p operator.Part) claimsStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	if began.Before(c.next) {
		return c.last
	}
	n, exact, err := p.Part.(counting).InFlight(ctx)
	hidden := redis.HasErrorPrefix(err, "NOPERM") || errors.Is(err, errors.ErrUnsupported)
	c.last = claimsStatus{p.Name, n, err == nil && !exact, TextOf(err), hidden}
	if err == nil {
		ended := time.Now()
		c.next = ended.Add(min(countRest*ended.Sub(began), maxCountRest))
	}
	return c.last
}

func lookAtConnections(ctx context.Context, s operator.Server) connectionsStatus {
	roles, most, err := s.Connections(ctx)
	c := connectionsStatus{Server: s.Name, Most: most, Roles: roles, Error: TextOf(err)}
	for _, r := range roles {
		c.Open += r.Active + r.Waiting + r.Idle
	}
	return c
}

// counters are the parts that count claims.
func (o *Operator) counters() []operator.Part {
	return slices.DeleteFunc(o.Parts(), func(p operator.Part) bool { _, ok := p.Part.(counting); return !ok })
}

// connected are the servers that tell their connections.
func (o *Operator) connected() []operator.Server {
	return slices.DeleteFunc(slices.Clone(o.Config.Servers), func(s operator.Server) bool { return s.Connections == nil })
}

// Total is how many are open, of those that the server takes.
func (c connectionsStatus) Total() string {
	if c.Most == 0 {
		return fmt.Sprint(c.Open)
	}
	return fmt.Sprintf("%d of %d", c.Open, c.Most)
}

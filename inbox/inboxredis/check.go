package inboxredis

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// checkTimeout bounds Processor.Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check looks for a Redis that may drop the marks of processed messages before their time, and
// asks the next processor, if that has a Check of its own. It returns nil when all is well, else
// the findings, or why it could not look, which it finds out within 6 seconds. Of a cluster it
// asks one node.
func (p *Processor) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	info, err := redisconn.Within(ctx, checkTimeout, func(ctx context.Context) (string, error) {
		return p.client.Info(ctx, "memory").Result()
	})
	if err != nil {
		found.Join(fmt.Errorf("inboxredis: check: %w", err))
	} else {
		checkClient(p.client, &found)
		checkMemory(info, "the marks of processed messages, and copies take effect again", &found)
	}
	if next, ok := p.next.(interface{ Check(context.Context) error }); ok {
		found.Join(next.Check(ctx))
	}
	return found.Err()
}

// checkClient looks for a client that waits without end.
func checkClient(client redis.UniversalClient, found *check.Findings) {
	if heedsDeadlines, bounded := redisconn.Timeouts(client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
}

// checkMemory looks for a Redis that may evict what is kept there.
func checkMemory(info, what string, found *check.Findings) {
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return
	}
	found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy is %s: Redis may evict %s", policy, what)
}

// infoField returns a field out of the reply to INFO, "" if it is not there.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

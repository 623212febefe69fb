package inboxredis

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// checkTimeout bounds Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check looks for a Redis that may drop the marks of processed messages before their time, and
// asks the next processor, if that has a Check of its own. It returns nil when all is well, else
// the findings, or why it could not look, which it finds out within 5 seconds. Of a cluster it
// asks one node.
func (p *Processor) Check(ctx context.Context) error {
	found := check.Findings{Component: "inboxredis"}
	info, err := p.askMemory(ctx)
	if err != nil {
		found.Join(fmt.Errorf("inboxredis: check: %w", err))
	} else {
		p.look(info, &found)
	}
	if next, ok := p.next.(interface{ Check(context.Context) error }); ok {
		found.Join(next.Check(ctx))
	}
	return found.Err()
}

func (p *Processor) askMemory(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel() // not before the answer is taken
	type answer struct {
		info string
		err  error
	}
	answers := make(chan answer, 1)
	go func() { // the client need not mind the deadline
		info, err := p.client.Info(ctx, "memory").Result()
		answers <- answer{info, err}
	}()
	var a answer
	select {
	case a = <-answers:
	case <-ctx.Done():
		a.err = ctx.Err()
	}
	return a.info, a.err
}

func (p *Processor) look(info string, found *check.Findings) {
	if heedsDeadlines, bounded := redisconn.Timeouts(p.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return
	}
	found.Add("CONFIG SET maxmemory-policy noeviction",
		"maxmemory-policy is %s: Redis may evict the marks of processed messages, and copies take effect again", policy)
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

package inboxredis

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// checkTimeout bounds Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check looks for a Redis that may drop the marks of processed messages before their time.
// No findings mean that all is well; an error means that it could not look, which it finds out
// within 5 seconds. Of a cluster it asks one node.
func (p *Processor) Check(ctx context.Context) ([]inbox.Finding, error) {
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
	if a.err != nil {
		return nil, fmt.Errorf("inboxredis: check: %w", a.err)
	}
	return p.findings(a.info), nil
}

func (p *Processor) findings(info string) (found []inbox.Finding) {
	if heedsDeadlines, bounded := redisconn.Timeouts(p.client); !heedsDeadlines && !bounded {
		found = append(found, inbox.Finding{
			Component: "inboxredis", Problem: "the client waits for ever for a connection that has fallen silent, and loses it for its pool",
			Mend: "set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
		})
	}
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return found
	}
	return append(found, inbox.Finding{
		Component: "inboxredis",
		Problem:   "maxmemory-policy is " + policy + ": Redis may evict the marks of processed messages, and copies take effect again",
		Mend:      "CONFIG SET maxmemory-policy noeviction",
	})
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

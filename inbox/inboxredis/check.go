package inboxredis

import (
	"context"
	"fmt"
	"strings"

	"github.com/holdfast-go/holdfast/inbox"
)

// Check looks for a Redis that may drop the marks of processed messages before their time.
// No findings mean that all is well; an error means that it could not look. Of a cluster it
// asks one node.
func (p *Processor) Check(ctx context.Context) ([]inbox.Finding, error) {
	info, err := p.client.Info(ctx, "memory").Result()
	if err != nil {
		return nil, fmt.Errorf("inboxredis: check: %w", err)
	}
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return nil, nil
	}
	return []inbox.Finding{{
		Component: "inboxredis",
		Problem:   "maxmemory-policy is " + policy + ": Redis may evict the marks of processed messages, and copies take effect again",
		Mend:      "CONFIG SET maxmemory-policy noeviction",
	}}, nil
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

package outboxredis

import (
	"context"
	"fmt"
	"strings"

	"github.com/holdfast-go/holdfast/internal/check"
)

// Finding is one thing that is missing or mis-set on the server.
type Finding = check.Finding

// Ready returns nil if Redis answers.
func (p *Publisher) Ready(ctx context.Context) error {
	if err := p.client.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("outboxredis: %w", err)
	}
	return nil
}

// Check looks at the configured stream and at the eviction policy, where the server
// tells it. No findings means that all is well; an error, that it could not look.
func (p *Publisher) Check(ctx context.Context) ([]Finding, error) {
	kind, err := p.client.Type(ctx, p.cfg.Stream).Result()
	if err != nil {
		return nil, fmt.Errorf("outboxredis: check: %w", err)
	}
	var findings []Finding
	if kind != "stream" && kind != "none" {
		findings = append(findings, Finding{
			Component: "outboxredis",
			Problem:   fmt.Sprintf("key %q is a %s, not a stream", p.cfg.Stream, kind),
			Mend:      "configure another stream, or remove the key",
		})
	}
	config, err := p.client.ConfigGet(ctx, "maxmemory-policy").Result()
	if err != nil {
		return findings, nil // managed servers hide their configuration
	}
	if policy := config["maxmemory-policy"]; strings.HasPrefix(policy, "allkeys-") {
		findings = append(findings, Finding{
			Component: "outboxredis",
			Problem:   fmt.Sprintf("maxmemory-policy %s may evict whole streams", policy),
			Mend:      "CONFIG SET maxmemory-policy noeviction",
		})
	}
	return findings, nil
}

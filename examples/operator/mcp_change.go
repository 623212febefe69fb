package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

func (a *agents) addChangers(s *mcp.Server) {
	addTool(s, &mcp.Tool{
		Name: "retry", Annotations: &mcp.ToolAnnotations{OpenWorldHint: new(false)},
		Description: "Send dead letters again: those of an outbox to be published, those of a consumer to be processed. First ask with dry_run how many they are.",
	}, a.retry)
	addTool(s, &mcp.Tool{
		Name: "drop", Annotations: &mcp.ToolAnnotations{OpenWorldHint: new(false)},
		Description: "Remove dead letters for ever. First ask with dry_run how many they are.",
	}, a.drop)
}

// asksDrop chooses dead letters that are to go.
type asksDrop struct {
	chosenLetters
	All    bool   `json:"all,omitempty" jsonschema:"really all of them, where nothing else chooses"`
	Reason string `json:"reason" jsonschema:"why, for the log"`
	DryRun bool   `json:"dry_run,omitempty" jsonschema:"only tell what would be done"`
}

// asksRetry chooses dead letters that are sent again.
type asksRetry struct {
	asksDrop
	Rate  float64 `json:"rate,omitempty" jsonschema:"at most so many a second"`
	Force bool    `json:"force,omitempty" jsonschema:"also those that are older than the consumers' memory of what was processed: they may take effect twice"`
	Patch string  `json:"patch,omitempty" jsonschema:"a JSON merge patch (RFC 7396) that changes the bodies on the way, where they may be seen"`
}

func (a *agents) drop(ctx context.Context, in asksDrop) (found[changed], error) {
	return a.change(ctx, "drop", in, change{})
}

func (a *agents) retry(ctx context.Context, in asksRetry) (found[changed], error) {
	e := edit{Patch: in.Patch}
	if !e.none() && !a.cfg.Access.Bodies {
		return found[changed]{}, errors.New("you may not see bodies, and so not edit them")
	}
	if err := e.validate(); err != nil {
		return found[changed]{}, err
	}
	return a.change(ctx, "retry", in.asksDrop, change{PerSecond: in.Rate, Force: in.Force, Edit: e.function(mayEdit(a.cfg.Mask))})
}

func (a *agents) change(ctx context.Context, what string, in asksDrop, c change) (found[changed], error) {
	places, s, err := in.selection(a.o)
	if err != nil {
		return found[changed]{}, err
	}
	if !s.chooses() && !in.All {
		return found[changed]{}, errors.New("choose by ids, name, key, class, group, error, since, until or limit, or say all")
	}
	c.By, c.Reason, c.DryRun = a.cfg.Access.By, in.Reason, in.DryRun
	if err := c.validate(); err != nil {
		return found[changed]{}, err
	}
	done, err := eachPlace(ctx, places, func(ctx context.Context, p place) ([]changed, error) {
		r, err := a.o.apply(ctx, what, p, s, c)
		if err == nil && r.Failed > 0 {
			err = fmt.Errorf("%d could not be", r.Failed)
		}
		return []changed{{p.name, r.Returned, r.Outlived, r.Failed, c.DryRun}}, err
	})
	return found[changed]{Found: done, Failed: textOf(err)}, nil
}

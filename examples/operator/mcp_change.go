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
	addTool(s, &mcp.Tool{
		Name: pausing, Annotations: &mcp.ToolAnnotations{IdempotentHint: true, OpenWorldHint: new(false)},
		Description: "Have all relays of an outbox, or all processes of a consumer, begin nothing more until resume. What comes waits.",
	}, a.turn(pausing))
	addTool(s, &mcp.Tool{
		Name: resuming, Annotations: &mcp.ToolAnnotations{IdempotentHint: true, OpenWorldHint: new(false)}, Description: "End the pause of an outbox or a consumer.",
	}, a.turn(resuming))
}

// asksTurn names a part that is paused or resumed.
type asksTurn struct {
	Part   string `json:"part" jsonschema:"the outbox or the consumer, by the name that status tells"`
	Reason string `json:"reason" jsonschema:"why, for the log"`
}

func (a *agents) turn(what string) func(context.Context, asksTurn) (turned, error) {
	return func(ctx context.Context, in asksTurn) (turned, error) {
		p, err := a.o.pausableNamed(in.Part)
		if err != nil {
			return turned{}, err
		}
		c := change{By: a.cfg.Access.By, Reason: in.Reason}
		if err := c.validate(); err != nil {
			return turned{}, err
		}
		return turned{Part: p.name, Paused: what == pausing}, a.o.turn(ctx, what, p, c)
	}
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

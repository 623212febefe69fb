package agents

import (
	"context"
	"errors"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
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
		Name: core.Pausing, Annotations: &mcp.ToolAnnotations{IdempotentHint: true, OpenWorldHint: new(false)},
		Description: "Have all relays of an outbox, or all processes of a consumer, begin nothing more until resume. What comes waits.",
	}, a.turn(core.Pausing))
	addTool(s, &mcp.Tool{
		Name: core.Resuming, Annotations: &mcp.ToolAnnotations{IdempotentHint: true, OpenWorldHint: new(false)}, Description: "End the pause of an outbox or a consumer.",
	}, a.turn(core.Resuming))
}

// asksTurn names a part that is paused or resumed.
type asksTurn struct {
	Part   string `json:"part" jsonschema:"the outbox or the consumer, by the name that status tells"`
	Reason string `json:"reason" jsonschema:"why, for the log"`
}

func (a *agents) turn(what string) func(context.Context, asksTurn) (core.Turned, error) {
	return func(ctx context.Context, in asksTurn) (core.Turned, error) {
		p, err := a.o.PausableNamed(in.Part)
		if err != nil {
			return core.Turned{}, err
		}
		c := core.Change{By: a.cfg.Access.By, Reason: in.Reason}
		if err := core.Validate(c); err != nil {
			return core.Turned{}, err
		}
		return core.Turned{Part: p.Name, Paused: what == core.Pausing}, a.o.Turn(ctx, what, p, c)
	}
}

// asksDrop chooses dead letters that are to go.
type asksDrop struct {
	core.Typed
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

func (a *agents) drop(ctx context.Context, in asksDrop) (found[core.Changed], error) {
	return a.change(ctx, "drop", in, core.Change{})
}

func (a *agents) retry(ctx context.Context, in asksRetry) (found[core.Changed], error) {
	e := core.Edit{Patch: in.Patch}
	if !e.None() && !a.cfg.Access.Bodies {
		return found[core.Changed]{}, errors.New("you may not see bodies, and so not edit them")
	}
	if err := e.Validate(); err != nil {
		return found[core.Changed]{}, err
	}
	return a.change(ctx, "retry", in.asksDrop, core.Change{PerSecond: in.Rate, Force: in.Force, Edit: e.Function(core.MayEdit(a.cfg.Mask))})
}

func (a *agents) change(ctx context.Context, what string, in asksDrop, c core.Change) (found[core.Changed], error) {
	places, f, err := a.o.Choose(in.Typed, "")
	if err != nil {
		return found[core.Changed]{}, err
	}
	if !core.Chooses(f) && !in.All {
		return found[core.Changed]{}, errors.New("choose by ids, name, key, class, group, error, since, until or limit, or say all")
	}
	c.By, c.Reason, c.DryRun = a.cfg.Access.By, in.Reason, in.DryRun
	if err := core.Validate(c); err != nil {
		return found[core.Changed]{}, err
	}
	done, err := a.o.ApplyTo(ctx, what, places, f, c, nil)
	return found[core.Changed]{Found: done, Failed: core.TextOf(err)}, nil
}

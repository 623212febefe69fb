package command

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// completeTimeout bounds the look for what completes a word: somebody has pressed a key.
const completeTimeout = 3 * time.Second

// complete says what completes the value of a flag.
func complete(cmd *cobra.Command, flag string, with cobra.CompletionFunc) {
	_ = cmd.RegisterFlagCompletionFunc(flag, with) // the flag is there, and has none yet
}

// noFiles has nothing completed where nothing else is: by themselves shells complete the names of files.
func noFiles(cmd *cobra.Command) {
	for _, child := range cmd.Commands() {
		noFiles(child)
	}
	if cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
		_, completed := cmd.GetFlagCompletionFunc(flag.Name)
		file := flag.Name == "body" || flag.Annotations[cobra.BashCompSubdirsInDir] != nil
		if !completed && !file {
			complete(cmd, flag.Name, cobra.NoFileCompletions)
		}
	})
}

// among completes what is one of some, and not given yet.
func among(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(begun, given, known)
	}
}

// several completes each of a list that is parted by commas.
func several(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		at := strings.LastIndex(begun, ",") + 1
		found, directive := completions(begun[at:], strings.Split(begun[:at], ","), known)
		return core.Mapped(found, func(one cobra.Completion) cobra.Completion { return begun[:at] + one }), directive
	}
}

// first completes the first argument alone.
func first(with cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(given) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return with(cmd, given, begun)
	}
}

// completions are those of the known texts that begin so, each once, without what was given. Behind a tab a text has what is
// shown beside it.
func completions(begun string, given, known []string) ([]cobra.Completion, cobra.ShellCompDirective) {
	values := map[string]bool{}
	for _, text := range known {
		text = strings.ReplaceAll(text, "\n", " ")
		word, _, _ := strings.Cut(text, "\t")
		if word != "" && strings.HasPrefix(word, begun) && !slices.Contains(given, word) {
			values[text] = true
		}
	}
	return slices.Sorted(maps.Keys(values)), cobra.ShellCompDirectiveNoFileComp
}

// flagValues complete the flags that choose dead letters with what some of them have.
var flagValues = map[string]func(core.Message) string{
	"name":  func(m core.Message) string { return core.Plain(m.Name) },
	"key":   func(m core.Message) string { return core.Plain(m.Key) },
	"class": func(m core.Message) string { return core.Plain(m.Class) },
	"group": func(m core.Message) string { return m.Fingerprint + "\t" + core.Plain(core.Short(m.Error, 60)) },
}

// messageID completes an id.
func messageID(m core.Message) string {
	return m.ID.String() + "\t" + core.Plain(m.Name+": "+core.Short(m.Error, 60))
}

// completing completes with what the dead letters have of the places of a kind, or of all, that answer in time.
func (o *commands) completing(kind string, value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(begun, given, core.Mapped(completeFrom(o, cmd, kind, someDeadLetters), value))
	}
}

// someDeadLetters are the last one of each kind of an outbox, and the first ones of a consumer: to count the kinds of a queue takes all
// its messages away from whoever is fixing them.
func someDeadLetters(ctx context.Context, at core.Place) ([]core.Message, error) {
	if at.Kind == core.KindInbox {
		return at.List(ctx, core.Filter{Limit: core.Listed}, false)
	}
	groups, err := at.Groups(ctx, core.Filter{})
	return core.Mapped(groups, func(g core.Group) core.Message { return g.Sample }), err
}

// completingWaiting completes with what the first messages have that outboxes hold.
func (o *commands) completingWaiting(parked bool, value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		held := completeFrom(o, cmd, core.KindOutbox, func(ctx context.Context, at core.Place) ([]core.Message, error) {
			return o.WaitingAt(ctx, at.Name, outbox.WaitingFilter{Parked: parked, Limit: core.MaxPerPage})
		})
		return completions(begun, given, core.Mapped(held, func(m core.Message) string { return core.Plain(value(m)) }))
	}
}

// completeFrom asks the places that --from names, all at the same time, as far as they answer in time.
func completeFrom(o *commands, cmd *cobra.Command, kind string, ask func(context.Context, core.Place) ([]core.Message, error)) []core.Message {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
	defer cancel()
	from, _ := cmd.Flags().GetStringSlice("from")
	places, _ := o.Chosen(from, kind) // what is no place completes nothing
	found := make([][]core.Message, len(places))
	var asking sync.WaitGroup
	for i, at := range places {
		asking.Go(func() { found[i], _ = ask(ctx, at) }) // what does not answer completes nothing
	}
	asking.Wait()
	return slices.Concat(found...)
}

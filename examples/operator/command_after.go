package operator

import (
	"fmt"

	"github.com/spf13/cobra"
)

// afterFlag is --after: where a list of an outbox goes on. The zero afterFlag is that of a command without it.
type afterFlag struct{ text *string }

func addAfter(cmd *cobra.Command) afterFlag {
	return afterFlag{cmd.Flags().String("after", "", "go on behind this `cursor`, as the list before told it; --from says of which outbox, where there are several")}
}

// cursor is what the flag says, of the one place that is listed.
func (f afterFlag) cursor(cmd *cobra.Command, places []place) (string, error) {
	if f.text == nil || *f.text == "" {
		return "", nil
	}
	if len(places) != 1 {
		return "", usagef("%s: --after: say --from: each outbox has its own list", cmd.CommandPath())
	}
	return *f.text, nil
}

// printMore says on stderr of each place that has filled its page how to go on: what is printed is read by programs, too.
func printMore(cmd *cobra.Command, places []place, letters []letter, limit int) {
	for _, at := range places {
		shown, last := 0, ""
		for _, l := range letters {
			if l.From == at.name {
				shown, last = shown+1, l.Cursor
			}
		}
		switch {
		case shown < limit:
		case last != "":
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: there may be more: --from=%s --after=%s\n", at.name, at.name, last)
		default:
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: the first %d that were found; they have no order to go on in: choose fewer, or raise --limit\n", at.name, shown)
		}
	}
}

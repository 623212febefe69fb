package operator

import (
	"context"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
)

// manyLetters is how many letters are worth a bar.
const manyLetters = 100

// withProgress has a change draw a bar on a terminal's error output, where it takes long: there are many
// letters, or they are paced.
func (o *Operator) withProgress(ctx context.Context, cmd *cobra.Command, what string, p place, s selection, c change) (change, func()) {
	nothing := func() {}
	if c.DryRun || !isTerminal(cmd.ErrOrStderr()) {
		return c, nothing
	}
	dry := c
	dry.DryRun, dry.Edit = true, nil
	would, _ := o.apply(ctx, what, p, s, dry) // the change itself will say what is wrong
	n := would.Returned + would.Failed
	if n == 0 || n < manyLetters && c.PerSecond == 0 {
		return c, nothing
	}
	bar := progressbar.NewOptions(n, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(p.name),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
	c.Progress = func(done int) { _ = bar.Set(min(done, n)) } // a bar that cannot be drawn is no failure
	return c, func() { _ = bar.Finish() }
}

// atWork shows on a terminal's error output what is worked on until done is called, for work of unknown length.
func atWork(cmd *cobra.Command, what string) (done func()) {
	if !isTerminal(cmd.ErrOrStderr()) {
		return func() {}
	}
	bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(what),
		progressbar.OptionSetElapsedTime(true), progressbar.OptionClearOnFinish())
	_ = bar.RenderBlank() // a bar that cannot be drawn is no failure
	return func() { _ = bar.Finish() }
}

package command

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// idempotency shows what is known of a key.
func (o *commands) idempotency() *cobra.Command {
	return parent("idempotency", "What is known of an idempotency key", o.idempotencyShow())
}

func (o *commands) idempotencyShow() *cobra.Command {
	cmd := &cobra.Command{
		Use: "show KEY", Short: "Show whether a key is free, in flight or done", Args: oneKey,
		Long: "Show whether a key is free, in flight or done, as each part knows it, since when and for how long yet. The key is that which\n" +
			"the client sent. Where it is in a scope, such as a tenant or a user, say that too: else it is another key.",
	}
	scope := cmd.Flags().String("scope", "", "the `scope` in which the service keeps the key")
	body := cmd.Flags().Bool("body", false, "show the stored answer, too")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		key, err := idempotency.ParseOpaque(args[0])
		if err != nil {
			return core.Mistakef("idempotency show: that is not a key: want 1 to 255 visible characters")
		}
		if *scope != "" {
			key = key.In(*scope)
		}
		found, failed := o.LookAtKey(cmd.Context(), driver.Key(key), *body)
		if len(found) == 0 && failed == nil {
			return core.Mistakef("idempotency show: there is no store of idempotency keys")
		}
		return errors.Join(printKnown(cmd, found), failed)
	}
	return cmd
}

func printKnown(cmd *cobra.Command, all []core.KnownKey) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	t := newTable(cmd.OutOrStdout(), "PART", "STATE", "SINCE", "ENDS IN", "STATUS", "BYTES", "FINGERPRINT")
	for _, k := range all {
		if k.State == core.KeyStates[0] {
			t.row(k.Part, k.State, "-", "-", "-", "-", "-")
			continue
		}
		ends, status := "-", "-"
		if k.Left > 0 {
			ends = core.Age(k.Left)
		}
		if k.Status > 0 {
			status = fmt.Sprint(k.Status)
		}
		t.row(k.Part, k.State, core.Moment(k.Since), ends, status, k.Bytes, k.Fingerprint)
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, k := range all {
		if k.Body != "" || k.BodyBase64 != "" {
			printBody(cmd.OutOrStdout(), k.Part+", body", k.Body, k.BodyBase64)
		}
	}
	return nil
}

// printBody prints a body below its title; one that is no text on one line.
func printBody(w io.Writer, title, text, base64 string) {
	if base64 != "" {
		fmt.Fprintf(w, "%-14s %s\n", title+", base64:", base64)
		return
	}
	fmt.Fprintln(w, title+":")
	for line := range strings.Lines(text) {
		fmt.Fprintf(w, "  %s\n", core.Plain(strings.TrimSuffix(line, "\n")))
	}
}

// limits shows and resets what callers have used of their limits.
func (o *commands) limits() *cobra.Command {
	return parent("limits", "What a caller has left of the rate limits", o.limitsShow(), o.limitsReset())
}

func (o *commands) limitsShow() *cobra.Command {
	cmd := &cobra.Command{Use: "show KEY", Short: "Show what the caller of a key has left", Args: oneKey}
	only := o.addLimit(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		states, err := o.LimitStates(cmd.Context(), *only, args[0])
		if states == nil {
			return err
		}
		return errors.Join(printLimits(cmd, states), err)
	}
	return cmd
}

// addLimit adds --limit to a command about the caller of a key, and completes both.
func (o *commands) addLimit(cmd *cobra.Command) *string {
	var names, keys []string
	for _, l := range o.Config.Limiters {
		names = append(names, core.Mapped(l.Limits, func(limit ratelimit.Limit) string { return limit.Name })...)
		keys = append(keys, l.Keys...)
	}
	only := cmd.Flags().String("limit", "", "only the limit of this `name`")
	complete(cmd, "limit", among(names))
	cmd.ValidArgsFunction = first(among(keys))
	return only
}

func printLimits(cmd *cobra.Command, states []core.LimitState) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, states)
	}
	t := newTable(cmd.OutOrStdout(), "LIMITER", "LIMIT", "MAX", "PER", "REMAINING", "MORE IN")
	for _, s := range states {
		t.row(s.Limiter, s.Limit, s.Max, core.Age(s.Window), s.Remaining, core.Age(s.Reset))
	}
	return t.flush()
}

func (o *commands) limitsReset() *cobra.Command {
	cmd := &cobra.Command{Use: "reset KEY", Short: "Forget what the caller of a key has used", Args: oneKey}
	only := o.addLimit(cmd)
	flags := addChangeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		done, err := o.ResetLimits(cmd.Context(), *only, args[0], c)
		return errors.Join(printResets(cmd, done), err)
	}
	return cmd
}

func printResets(cmd *cobra.Command, done []core.LimitReset) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	for _, r := range done {
		verb := "is reset"
		if r.DryRun {
			verb = "would be reset"
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s %s\n", r.Limiter, r.Limit, verb)
	}
	return nil
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return core.Mistakef("%s: say the key of one caller", cmd.CommandPath())
	}
	return nil
}

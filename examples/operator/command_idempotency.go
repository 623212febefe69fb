package operator

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// looker is a part that tells what it knows of an idempotency key.
type looker interface {
	Look(ctx context.Context, key driver.Key) (driver.Known, error)
}

// idempotency shows what is known of a key.
func (o *Operator) idempotency() *cobra.Command {
	return parent("idempotency", "What is known of an idempotency key", o.idempotencyShow())
}

// knownKey is what one part knows of a key. The key itself is not told.
type knownKey struct {
	Part  string    `json:"part"`
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Left is for how many seconds that stands; 0: the part does not tell.
	Left        float64 `json:"left_seconds"`
	Fingerprint string  `json:"fingerprint,omitempty"`
	Status      int     `json:"status,omitempty"` // of HTTP
	Bytes       int     `json:"body_bytes,omitempty"`
	Body        string  `json:"body,omitempty"`
	BodyBase64  string  `json:"body_base64,omitempty"` // of a body that is no text
}

func (o *Operator) idempotencyShow() *cobra.Command {
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
			return usagef("idempotency show: that is not a key: want 1 to 255 visible characters")
		}
		if *scope != "" {
			key = key.In(*scope)
		}
		found, failed := o.lookAtKey(cmd.Context(), driver.Key(key), *body)
		if len(found) == 0 && failed == nil {
			return usagef("idempotency show: there is no store of idempotency keys")
		}
		return errors.Join(printKnown(cmd, found), failed)
	}
	return cmd
}

func (o *Operator) lookAtKey(ctx context.Context, key driver.Key, body bool) ([]knownKey, error) {
	found := []knownKey{} // not null in JSON
	var failed []error
	for _, p := range o.cfg.parts() {
		store, ok := p.Part.(looker)
		if !ok {
			continue
		}
		known, err := store.Look(ctx, key)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
			continue
		}
		found = append(found, knownAt(p.Name, known, body))
	}
	return found, errors.Join(failed...)
}

// keyStates are the words for what a store says.
var keyStates = map[driver.State]string{0: "free", driver.InProgress: "in flight", driver.Completed: "done"}

func knownAt(part string, known driver.Known, body bool) knownKey {
	k := knownKey{
		Part: part, State: keyStates[known.State], Since: known.Since, Left: known.Left.Seconds(),
		Fingerprint: known.Fingerprint.Sum, Status: known.Response.Status, Bytes: len(known.Response.Body),
	}
	switch {
	case !body:
	case utf8.Valid(known.Response.Body):
		k.Body = string(known.Response.Body)
	default:
		k.BodyBase64 = base64.StdEncoding.EncodeToString(known.Response.Body)
	}
	return k
}

func printKnown(cmd *cobra.Command, all []knownKey) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	t := newTable(cmd.OutOrStdout(), "PART", "STATE", "SINCE", "ENDS IN", "STATUS", "BYTES", "FINGERPRINT")
	for _, k := range all {
		if k.State == keyStates[0] {
			t.row(k.Part, k.State, "-", "-", "-", "-", "-")
			continue
		}
		ends, status := "-", "-"
		if k.Left > 0 {
			ends = age(k.Left)
		}
		if k.Status > 0 {
			status = fmt.Sprint(k.Status)
		}
		t.row(k.Part, k.State, moment(k.Since), ends, status, k.Bytes, k.Fingerprint)
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
		fmt.Fprintf(w, "  %s\n", plain(strings.TrimSuffix(line, "\n")))
	}
}

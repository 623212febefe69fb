package command

import (
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// addSelectFlags adds the flags that choose dead letters to a command about the places of a kind, or about all.
func (o *commands) addSelectFlags(cmd *cobra.Command, kind string) *core.Typed {
	t := &core.Typed{}
	flags := cmd.Flags()
	o.addFrom(cmd, kind, &t.From)
	flags.StringVar(&t.Name, "name", "", "only messages of this `name`")
	flags.StringVar(&t.Key, "key", "", "only messages of this ordering `key`")
	flags.StringVar(&t.Class, "class", "", "only failures of this `class`")
	flags.StringVar(&t.Group, "group", "", "only failures of this `kind`, as groups prints it")
	flags.StringVar(&t.Error, "error", "", "only failures with this `text` in the error")
	flags.StringVar(&t.Since, "since", "", "only failures since this `time`: 2h for two hours ago, or 2026-01-02T15:04:05Z")
	flags.StringVar(&t.Until, "until", "", "only failures before this `time`")
	flags.IntVar(&t.Limit, "limit", 0, "at most so many of each place (of groups: so many groups)")
	for flag, value := range flagValues {
		complete(cmd, flag, o.completing(kind, value))
	}
	return t
}

// addFrom adds --from to a command about the places of a kind, or about all.
func (o *commands) addFrom(cmd *cobra.Command, kind string, names *[]string) {
	known := o.PlaceNames(kind)
	usage := "only of this `place`: " + strings.Join(known, ", ")
	if kind == "" {
		usage += ", or all outboxes (outbox) or consumers (inbox)"
		known = append(known, core.KindOutbox, core.KindInbox)
	}
	cmd.Flags().StringSliceVar(names, "from", nil, usage)
	complete(cmd, "from", several(known))
}

// changeFlags say who changes something, and how.
type changeFlags struct{ c core.Change }

func addChangeFlags(cmd *cobra.Command) *changeFlags {
	return addNotedFlags(cmd, "only tell what would be done")
}

// addNotedFlags are those of a command that says what its dry run tells.
func addNotedFlags(cmd *cobra.Command, dryRun string) *changeFlags {
	f := &changeFlags{}
	flags := cmd.Flags()
	flags.StringVar(&f.c.By, "by", osUser(), "`who` does it; kept in the log")
	flags.StringVar(&f.c.Reason, "reason", "", "`why`; kept, too")
	flags.BoolVar(&f.c.DryRun, "dry-run", false, dryRun)
	return f
}

// editFlags replace bodies.
type editFlags struct{ file, patch string }

func addEditFlags(cmd *cobra.Command) *editFlags {
	f := &editFlags{}
	cmd.Flags().StringVar(&f.file, "body", "", "the one message gets the content of this `file` as its body (-: of the standard input)")
	cmd.Flags().StringVar(&f.patch, "patch", "", "the bodies are changed by this JSON merge `patch` (RFC 7396), such as '{\"currency\":\"EUR\",\"total\":null}'")
	return f
}

// edit is what the flags say of the messages that are named.
func (f *editFlags) edit(cmd *cobra.Command, ids []string) (e core.Edit, err error) {
	e.Patch = f.patch
	if f.file != "" {
		if len(ids) != 1 {
			return e, core.Mistakef("--body: name the one message that gets it")
		}
		if e.Body, err = readFile(cmd, f.file); err != nil {
			return e, core.Mistakef("--body: %w", err)
		}
	}
	if err := e.Validate(); err != nil {
		return e, core.Mistakef("%w", err)
	}
	return e, nil
}

// readFile reads what a body may have, and a byte more.
func readFile(cmd *cobra.Command, name string) ([]byte, error) {
	in := cmd.InOrStdin()
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		in = file
	}
	return io.ReadAll(io.LimitReader(in, core.MaxEdit+1))
}

// change is what the flags say.
func (f *changeFlags) change() (core.Change, error) {
	if f.c.By == "" && !f.c.DryRun {
		return f.c, core.Mistakef("say --by")
	}
	if err := core.Validate(f.c); err != nil {
		return f.c, core.Mistakef("--%w", err)
	}
	return f.c, nil
}

// osUser is who runs the program: in a container maybe a number without a name.
func osUser() string {
	u, err := user.Current()
	if err != nil || u.Username == "" {
		return fmt.Sprintf("uid %d", os.Getuid())
	}
	return u.Username
}

// seconds is a duration whose bare numbers are seconds.
type seconds time.Duration

func (s *seconds) String() string { return time.Duration(*s).String() }

func (s *seconds) Type() string { return "time" }

func (s *seconds) Set(text string) error {
	if n, err := strconv.ParseUint(text, 10, 31); err == nil {
		*s = seconds(time.Duration(n) * time.Second)
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return fmt.Errorf("want seconds or a duration such as 55s, not negative")
	}
	*s = seconds(d)
	return nil
}

// size is a number of bytes, with K, M or G behind it or nothing.
type size uint64

func (s *size) String() string { return strconv.FormatUint(uint64(*s), 10) }

func (s *size) Type() string { return "bytes" }

func (s *size) Set(text string) error {
	shift := 0
	for suffix, n := range map[string]int{"K": 10, "M": 20, "G": 30} {
		if number, ok := strings.CutSuffix(text, suffix); ok {
			text, shift = number, n
			break
		}
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return fmt.Errorf("want bytes, or a number with K, M or G behind it")
	}
	*s = size(n << shift)
	return nil
}

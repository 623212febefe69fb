package operator

import (
	"fmt"
	"io"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
)

// listed is how many letters are listed where nothing else is asked for.
const listed = 100

// selectFlags are those that choose dead letters.
type selectFlags struct {
	s            selection
	since, until string
}

// addSelectFlags adds them to a command about the places of a kind, or about all.
func (o *Operator) addSelectFlags(cmd *cobra.Command, kind string) *selectFlags {
	f := &selectFlags{}
	flags := cmd.Flags()
	flags.StringVar(&f.s.Name, "name", "", "only messages of this `name`")
	flags.StringVar(&f.s.Key, "key", "", "only messages of this ordering `key`")
	flags.StringVar(&f.s.Class, "class", "", "only failures of this `class`")
	flags.StringVar(&f.s.Group, "group", "", "only failures of this `kind`, as groups prints it")
	flags.StringVar(&f.s.ErrorContains, "error", "", "only failures with this `text` in the error")
	flags.StringVar(&f.since, "since", "", "only failures since this `time`: 2h for two hours ago, or 2026-01-02T15:04:05Z")
	flags.StringVar(&f.until, "until", "", "only failures before this `time`")
	flags.IntVar(&f.s.Limit, "limit", 0, "at most so many of each place (of groups: so many groups)")
	for flag, value := range letterValues {
		complete(cmd, flag, o.completing(kind, value))
	}
	return f
}

// selection is what the flags and the ids choose.
func (f *selectFlags) selection(ids []string) (s selection, err error) {
	s = f.s
	for _, text := range ids {
		id, err := uuid.Parse(text)
		if err != nil {
			return s, usagef("%.40q is not an id", text)
		}
		s.IDs = append(s.IDs, id)
	}
	if s.Limit < 0 {
		return s, usagef("--limit must not be negative")
	}
	if s.After, err = parseMoment(f.since); err != nil {
		return s, usagef("--since: %w", err)
	}
	if s.Before, err = parseMoment(f.until); err != nil {
		return s, usagef("--until: %w", err)
	}
	return s, nil
}

// parseMoment reads a time, or how long ago it was.
func parseMoment(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return time.Now().Add(-ago), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, fmt.Errorf("%.40q is neither a duration such as 2h nor a time such as 2026-01-02T15:04:05Z", text)
	}
	return at, nil
}

// String is the selection in the words of the flags.
func (s selection) String() string {
	var words []string
	add := func(flag, value string) {
		if value != "" {
			words = append(words, fmt.Sprintf("--%s=%s", flag, strconv.Quote(value)))
		}
	}
	if n := len(s.IDs); n > 3 {
		words = append(words, fmt.Sprintf("%d ids, the first %s", n, s.IDs[0]))
	} else {
		for _, id := range s.IDs {
			words = append(words, id.String())
		}
	}
	add("name", s.Name)
	add("key", s.Key)
	add("class", s.Class)
	add("group", s.Group)
	add("error", s.ErrorContains)
	if !s.After.IsZero() {
		add("since", moment(s.After))
	}
	if !s.Before.IsZero() {
		add("until", moment(s.Before))
	}
	if s.Limit > 0 {
		words = append(words, fmt.Sprintf("--limit=%d", s.Limit))
	}
	if len(words) == 0 {
		return "--all"
	}
	return strings.Join(words, " ")
}

// chooses reports whether anything is chosen: nothing is all.
func (s selection) chooses() bool { return s.String() != "--all" }

// placeFlag is --from.
type placeFlag struct{ names []string }

// addFrom adds it to a command about the places of a kind, or about all.
func (o *Operator) addFrom(cmd *cobra.Command, kind string) *placeFlag {
	f := &placeFlag{}
	known := o.placeNames(kind)
	usage := "only of this `place`: " + strings.Join(known, ", ")
	if kind == "" {
		usage += ", or all outboxes (outbox) or consumers (inbox)"
		known = append(known, kindOutbox, kindInbox)
	}
	cmd.Flags().StringSliceVar(&f.names, "from", nil, usage)
	complete(cmd, "from", several(known))
	return f
}

// chosen are the places that the flag names, each once, or all: those of one kind, where only they can
// do what is asked. A place that has the name of a kind is meant before the kind.
func (o *Operator) chosen(f *placeFlag, kind string) ([]place, error) {
	all := slices.DeleteFunc(o.places(), func(p place) bool { return kind != "" && p.kind != kind })
	if len(f.names) == 0 {
		return all, nil
	}
	wanted := map[string]bool{}
	for _, name := range f.names {
		named := func(p place) bool { return p.name == name }
		if !slices.ContainsFunc(all, named) {
			named = func(p place) bool { return p.kind == name }
		}
		found := false
		for _, p := range all {
			if named(p) {
				wanted[p.name], found = true, true
			}
		}
		if !found {
			return nil, usagef("--from: there is no %.40q here", name)
		}
	}
	return slices.DeleteFunc(all, func(p place) bool { return !wanted[p.name] }), nil
}

// changeFlags say who changes something, and how.
type changeFlags struct{ c change }

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
func (f *editFlags) edit(cmd *cobra.Command, ids []string) (e edit, err error) {
	e.Patch = f.patch
	if f.file != "" {
		if len(ids) != 1 {
			return e, usagef("--body: name the one message that gets it")
		}
		if e.Body, err = readFile(cmd, f.file); err != nil {
			return e, usagef("--body: %w", err)
		}
	}
	if err := e.validate(); err != nil {
		return e, usagef("%w", err)
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
	return io.ReadAll(io.LimitReader(in, maxEdit+1))
}

// change is what the flags say.
func (f *changeFlags) change() (change, error) {
	if f.c.By == "" && !f.c.DryRun {
		return f.c, usagef("say --by")
	}
	if err := f.c.validate(); err != nil {
		return f.c, usagef("--%w", err)
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
func (s *seconds) Type() string   { return "time" }

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
func (s *size) Type() string   { return "bytes" }

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

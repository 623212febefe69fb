// Package core is the shared part of the page, the commands and the agents: the status, dead letters, changes of them,
// pauses, limits and the log of one service.
package core

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// Operator is the operator's side of one service. Make it with New. It is safe for concurrent use.
type Operator struct {
	Config operator.Config
	// turns has the turn of each consumer, by its name. waits is the turn for messages that wait for an attempt:
	// on RabbitMQ the consumers share the queues of these messages.
	turns map[string]*turn
	waits *turn
	// claims are the last counts of claims, one for each part that counts them.
	claims []claimsCount
	// history and processes are the last readings of the history.
	history   reading[History]
	processes reading[reported]
	// checked are the findings of the last check, and pinged the servers that did not answer the last ping.
	checked reading[[]FindingState]
	pinged  reading[[]unanswered]
	// stories bounds the lookups of single messages.
	stories pace
}

// New returns an Operator. The error names every violation in cfg. It does not connect to a server.
func New(cfg operator.Config) (*Operator, error) {
	cfg = withDefaults(cfg)
	if err := validate(cfg); err != nil {
		return nil, err
	}
	o := &Operator{Config: cfg, turns: map[string]*turn{}, waits: newTurn(), stories: pace{turn: make(chan struct{}, 1)}}
	o.claims = make([]claimsCount, len(o.counters()))
	for _, c := range cfg.Consumers {
		o.turns[c.Name] = newTurn()
	}
	return o, nil
}

// Mistake is an error in a request, such as an unknown name.
type Mistake struct{ err error }

func (e *Mistake) Error() string { return e.err.Error() }

func (e *Mistake) Unwrap() error { return e.err }

// Mistakef returns a Mistake.
func Mistakef(format string, args ...any) error { return &Mistake{fmt.Errorf(format, args...)} }

// name matches the name of a part, which is used in flags and addresses.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// withDefaults returns c with a name for every outbox.
func withDefaults(c operator.Config) operator.Config {
	c.Program = cmp.Or(c.Program, "holdfast")
	outboxes := make([]operator.Outbox, len(c.Outboxes))
	for i, o := range c.Outboxes {
		o.Name = cmp.Or(o.Name, "outbox")
		outboxes[i] = o
	}
	c.Outboxes = outboxes
	return c
}

// validate returns every violation in a Config.
func validate(c operator.Config) error {
	var errs []error
	taken := map[string]bool{}
	check := func(kind, text string, missing bool) {
		switch {
		case !name.MatchString(text):
			errs = append(errs, fmt.Errorf("operator: %s %.70q: a name is 1 to 64 letters, digits, dots, dashes and underscores", kind, text))
		case taken[text]:
			errs = append(errs, fmt.Errorf("operator: %s %s: the name is taken", kind, text))
		case missing:
			errs = append(errs, fmt.Errorf("operator: %s %s is nil", kind, text))
		}
		taken[text] = true
	}
	for _, o := range c.Outboxes {
		check("outbox", o.Name, o.Store == nil)
	}
	for _, q := range c.Consumers {
		check("consumer", q.Name, q.Consumer == nil)
	}
	for _, s := range c.Sweeps {
		check("sweep", s.Name, s.Store == nil)
	}
	for _, l := range c.Limiters {
		check("limiter", l.Name, l.Limiter == nil)
	}
	for _, p := range c.Parts {
		check("part", p.Name, p.Part == nil)
	}
	for _, s := range c.Servers {
		if s.Name == "" || s.Ping == nil {
			errs = append(errs, errors.New("operator: a server needs a name and a Ping"))
		}
	}
	return errors.Join(append(errs, checkTraceURL(c.TraceURL))...)
}

// traceID stands for the id of a trace in Config.TraceURL.
const traceID = "{trace_id}"

func checkTraceURL(template string) error {
	u, err := url.Parse(strings.ReplaceAll(template, traceID, "0"))
	valid := err == nil && (u.Scheme == "https" || u.Scheme == "http") && u.Host != "" && strings.Contains(template, traceID)
	if template == "" || valid {
		return nil
	}
	return fmt.Errorf("operator: trace URL %.100q: want an address such as https://tempo.example/trace/%s", template, traceID)
}

// Parts returns all parts by name. The parts of one outbox or consumer follow each other.
func (o *Operator) Parts() []operator.Part {
	var all []operator.Part
	add := func(name string, part any) {
		if part != nil {
			all = append(all, operator.Part{Name: name, Part: part})
		}
	}
	for _, b := range o.Config.Outboxes {
		add(b.Name, b.Store)
		if b.Relay != nil {
			add(b.Name, b.Relay)
		}
	}
	for _, q := range o.Config.Consumers {
		add(q.Name, q.Inbox)
		add(q.Name, q.Consumer)
	}
	for _, s := range o.Config.Sweeps {
		add(s.Name, s.Store)
	}
	for _, l := range o.Config.Limiters {
		add(l.Name, l.Limiter)
	}
	all = append(all, o.Config.Parts...)
	if o.Config.Log != nil {
		add("log", o.Config.Log)
	}
	if o.Config.History != nil {
		add("history", o.Config.History)
	}
	return all
}

// ReadTimeout bounds reading dead letters: a queue may hold very many.
const ReadTimeout = 60 * time.Second

// OneLine returns the text of an error on one line.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// TextOf returns the text of an error on one line; "" for nil.
func TextOf(err error) string {
	if err == nil {
		return ""
	}
	return OneLine(err)
}

// Age formats a number of seconds for a column.
func Age(seconds float64) string { return span(time.Duration(seconds * float64(time.Second))) }

// ChangesTerminal reports whether a character does more to a terminal than appear: control characters, line ends, and
// characters that change the direction of text.
func ChangesTerminal(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// Plain replaces the characters of a text that change a terminal by spaces. A message's name, for example, may
// contain some.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if ChangesTerminal(r) {
			return ' '
		}
		return r
	}, text)
}

// Short cuts a text to limit characters.
func Short(text string, limit int) string {
	runes := []rune(text)
	if len(runes) <= limit {
		return text
	}
	return string(runes[:limit-1]) + "…"
}

// Moment formats a time for a column: in UTC, to the second.
func Moment(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return at.UTC().Format(time.RFC3339)
}

// Rate formats a rate per second.
func Rate(perSecond *float64) string { return strconv.FormatFloat(*perSecond, 'f', 1, 64) }

// Percent formats a part of 1.
func Percent(part float64) string { return strconv.Itoa(int(math.Round(part*100))) + " %" }

// span formats a duration for a column.
func span(d time.Duration) string {
	switch {
	case d <= 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}

// Package deadletter has what the dead letters of an outbox and those of a consumer share: the types that packages outbox and
// inbox give to users under the same names, the checks of what users pass, and the steps in which a store changes many.
// M is the message of the core.
package deadletter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/actor"
)

var (
	// ErrNotFound means that there is no dead letter with the id.
	ErrNotFound = errors.New("no such dead letter")
	// ErrOutlived means that a replay left dead letters where they are because they are older than the consumer's memory of
	// processed messages. Replay.Force returns them too.
	ErrOutlived = errors.New("dead letters are older than the memory of processed messages")
)

const (
	// ListLimit is the limit of a List that sets none.
	ListLimit = 100
	// GroupsLimit is the limit of a Groups that sets none, and how many groups a consumer tells apart.
	GroupsLimit = 1000
	// Retention is for how long consumers remember processed messages by default.
	Retention = 8 * 24 * time.Hour
	// ListBytes bounds the bodies of one List together.
	ListBytes = 32 << 20

	maxIDs  = 10_000
	maxText = 1000
)

// DeadLetters shows and moves the messages that were given up: by relays, or by a consumer. It is safe for concurrent use.
type DeadLetters[M any] interface {
	// List returns the dead letters that f selects, those of an outbox the oldest first.
	List(ctx context.Context, f Filter) ([]DeadLetter[M], error)
	// Show returns one whole dead letter, the latest of several with the id, or ErrNotFound.
	Show(ctx context.Context, id uuid.UUID) (DeadLetter[M], error)
	// Count returns how many dead letters f selects. Filter.Limit bounds the count.
	Count(ctx context.Context, f Filter) (int, error)
	// Groups counts the selected dead letters by their fingerprints, the largest group first. Filter.Limit bounds the
	// groups; 0 means 1,000. A consumer tells 1,000 kinds apart, and the others are one group more, without a fingerprint.
	Groups(ctx context.Context, f Filter) ([]Group[M], error)
	// Replay makes the selected dead letters messages again, with their attempts forgotten: it returns those of an outbox
	// to be published, and those of a consumer to the queues they came from. It selects among those that are there when it
	// begins. A dead letter that cannot be returned stays, and does not keep the others; the error then names the first one.
	// With any other error Replayed has what was done before. If the server does not answer, some more may have
	// moved: calling again does no harm.
	//
	// An outbox moves at most 500 in one transaction. They keep the order in which they were stored, behind all messages
	// that the outbox holds at that time; messages that are written meanwhile may come between them. A message of a
	// consumer that fails again is a dead letter again: exclude it from a second call with Filter.FailedBefore.
	Replay(ctx context.Context, f Filter, r Replay[M]) (Replayed, error)
	// Remove deletes the selected dead letters, those of an outbox the oldest first and at most 500 in one transaction, and
	// returns how many, also with an error. It treats failures as Replay does.
	Remove(ctx context.Context, f Filter, r Removal) (int, error)
}

// DeadLetter is a message that was given up, and why.
type DeadLetter[M any] struct {
	// Message is the message as it was stored, or as it last arrived.
	Message M
	// Class is the kind of the last failure, such as "permanent", "unroutable" or "validation". It selects the dead-letter
	// queue of a consumer.
	Class string
	// Error is the text of the last failure, at most 1,024 bytes of UTF-8. Message.History of a consumer has the failures
	// before.
	Error string
	// ErrorType is the Go type of the last failure of a handler, such as *pgconn.PgError: the first in its chain that is no
	// wrapper of packages fmt, errors and inbox. SQLState is its SQLSTATE. Both are empty if there is none, or if it is not
	// known.
	ErrorType, SQLState string
	// Fingerprint is the same for failures of one kind, in all processes and versions of a program. It is 16 digits made of
	// the class, and of the transport, the message's name and the error's text; or of the error's type and SQLSTATE, and
	// the function that panicked or the message's name. Of a text, quotations and words with a digit do not count.
	Fingerprint string
	// Attempts counts the failed attempts.
	Attempts int
	// CreatedAt is when the outbox stored the message; zero for a consumer.
	CreatedAt time.Time `json:",omitzero"`
	// FirstFailedAt and FailedAt are the times of the first and the last failure. An outbox knows the last one only. The
	// times of an outbox are of the store's clock, and zero where another program has made them infinite.
	FirstFailedAt, FailedAt time.Time
	// Consumer names the consumer that gave the message up.
	Consumer string
	// Omitted says that List left out the body and the headers of a consumer's message.
	Omitted bool
	// Unreadable says why an outbox's Message is not complete: another program stored something else, or the bodies of one
	// List are more than 32 MiB together. Replay moves the row as it is. Nil: the Message is complete.
	Unreadable error `json:"-"`
	// Cursor is the place of the dead letter in a List of an outbox: as Filter.After of another List it begins behind it,
	// also if the dead letter is gone. Only the store can read it.
	Cursor string `json:",omitempty"`
}

// Group are dead letters of one kind.
type Group[M any] struct {
	// Fingerprint is that of all of them; Filter.Fingerprint selects them.
	Fingerprint string
	// Count is how many there are.
	Count int
	// First and Last are the earliest and the latest of their last failures.
	First, Last time.Time
	// Sample is the latest of them, without the body and the headers of its message.
	Sample DeadLetter[M]
}

// Filter selects dead letters: those that match every field that is set. The zero Filter selects all.
type Filter struct {
	// IDs selects by message id, at most 10,000. Ids without a dead letter are passed over. Nil: any.
	IDs []uuid.UUID `json:"ids,omitempty"`
	// Class, Name and Key select what equals them. Optional.
	Class string `json:"class,omitempty"`
	Name  string `json:"name,omitempty"`
	Key   string `json:"key,omitempty"`
	// Fingerprint selects failures of one kind. Optional.
	Fingerprint string `json:"fingerprint,omitempty"`
	// ErrorContains selects by a part of the error's text, at most 1,000 bytes. Case does not matter. Optional.
	ErrorContains string `json:"error_contains,omitempty"`
	// FailedAfter and FailedBefore bound the last failure. FailedAfter is included, FailedBefore is not. Optional.
	FailedAfter  time.Time `json:"failed_after,omitzero"`
	FailedBefore time.Time `json:"failed_before,omitzero"`
	// Limit is the most dead letters that are listed, counted, returned or removed, of an outbox the oldest. Those that a
	// consumer's replay leaves where they are do not count. Default: 100 for List, 1,000 for Groups, none for the others.
	Limit int `json:"limit,omitempty"`
	// After is the Cursor of a dead letter: a List of an outbox begins behind it. Everything else refuses it: dead letters
	// in a queue have no lasting place. A dead letter that is stored meanwhile may lie before the place: a List that
	// begins again shows it.
	After string `json:"-"`
	// Whole has a List of a consumer include bodies and headers, until they are 32 MiB together. A List of an outbox
	// always includes them.
	Whole bool `json:"-"`
}

// Replay says who returns dead letters, and how.
type Replay[M any] struct {
	// By and Reason are as in Removal. A DryRun needs no By.
	By, Reason string
	// PerSecond bounds how many return each second. Default: no bound.
	PerSecond float64
	// DryRun counts and moves nothing. That of a consumer does not see that a queue is gone.
	DryRun bool
	// Progress is called after each step of an outbox, and after each message of a consumer, with the sums until then, by
	// the goroutine that called Replay. A DryRun of an outbox has steps if it edits. Optional.
	Progress func(Replayed)
	// Edit returns the body with which a message returns, or an error: it stays and counts as failed. A DryRun calls it
	// too. It must not change its argument. An outbox then moves 20 at a time. Optional.
	//
	// A message keeps its id, so that it is not processed again if it was processed after all. The bodies of structured
	// CloudEvents, and of messages that Symfony has wrapped for a Redis stream, cannot be replaced: such messages stay.
	Edit func(M) ([]byte, error)
	// Force also returns dead letters that the consumer may not remember: an outbox's stored more than 8 days ago, and a
	// consumer's sent before its retention. Such a message may have taken effect after all, its confirm or its
	// acknowledgement lost on the way, and may then take effect again.
	Force bool
}

// Removal says who deletes dead letters.
type Removal struct {
	// By names who asks for it and is required, 1 to 128 bytes; Reason is optional, at most 1,000 bytes. Both are UTF-8
	// without control characters. Postgres keeps them in an audit, a consumer logs them.
	By, Reason string
	// Progress is called as that of a Replay, with how many are deleted until then. Optional.
	Progress func(removed int)
}

// Replayed is what became of the dead letters that a replay selected.
type Replayed struct {
	// Returned are messages again; with DryRun, would be.
	Returned int
	// Outlived were refused for their age, and stay. The error of Replay is then ErrOutlived.
	Outlived int
	// Failed could not be edited or returned, and stay. An outbox also counts those whose id it holds again.
	Failed int
}

// Check returns every violation of a Filter for anything but a List.
func (f Filter) Check() error {
	var errs []error
	if f.After != "" {
		errs = append(errs, errors.New("Filter.After is for a List of an outbox alone"))
	}
	return errors.Join(append(errs, f.CheckList())...)
}

// CheckList returns every violation of a Filter for a List, but for its cursor.
func (f Filter) CheckList() error {
	var errs []error
	if f.Limit < 0 {
		errs = append(errs, fmt.Errorf("Filter.Limit is %d, want 0 or more", f.Limit))
	}
	if len(f.IDs) > maxIDs {
		errs = append(errs, fmt.Errorf("Filter.IDs has %d entries, at most %d are allowed", len(f.IDs), maxIDs))
	}
	if max(len(f.Class), len(f.Name), len(f.Key), len(f.Fingerprint), len(f.ErrorContains)) > maxText {
		errs = append(errs, fmt.Errorf("Filter has a text of more than %d bytes", maxText))
	}
	return errors.Join(errs...)
}

// Matches reports whether a filter, its Limit and After aside, selects the dead letter of a message.
func Matches[M any](f Filter, d DeadLetter[M], id uuid.UUID, name, key string) bool {
	same := func(want, is string) bool { return want == "" || want == is }
	return (f.IDs == nil || slices.Contains(f.IDs, id)) &&
		same(f.Class, d.Class) && same(f.Name, name) && same(f.Key, key) && same(f.Fingerprint, d.Fingerprint) &&
		(f.ErrorContains == "" || strings.Contains(strings.ToLower(d.Error), strings.ToLower(f.ErrorContains))) &&
		(f.FailedAfter.IsZero() || !d.FailedAt.Before(f.FailedAfter)) && (f.FailedBefore.IsZero() || d.FailedAt.Before(f.FailedBefore))
}

// LogValue implements slog.LogValuer with the fields that are set.
func (f Filter) LogValue() slog.Value {
	var attrs []slog.Attr
	add := func(set bool, attr slog.Attr) {
		if set {
			attrs = append(attrs, attr)
		}
	}
	if len(f.IDs) > 0 {
		attrs = append(attrs, slog.Int("ids", len(f.IDs)), slog.Any("first_id", f.IDs[0]))
	}
	add(f.Class != "", slog.String("class", f.Class))
	add(f.Name != "", slog.String("name", f.Name))
	add(f.Key != "", slog.String("key", f.Key))
	add(f.Fingerprint != "", slog.String("fingerprint", f.Fingerprint))
	add(!f.FailedAfter.IsZero(), slog.Time("failed_after", f.FailedAfter))
	add(!f.FailedBefore.IsZero(), slog.Time("failed_before", f.FailedBefore))
	add(f.ErrorContains != "", slog.String("error_contains", f.ErrorContains))
	add(f.Limit > 0, slog.Int("limit", f.Limit))
	return slog.GroupValue(attrs...)
}

// Check returns every violation of a Replay.
func (r Replay[M]) Check() error {
	var errs []error
	if !r.DryRun || r.By != "" || r.Reason != "" {
		errs = append(errs, actor.Check("Replay.By", "Replay.Reason", r.By, r.Reason))
	}
	if !(r.PerSecond >= 0) || math.IsInf(r.PerSecond, 0) { // NaN is refused as well
		errs = append(errs, fmt.Errorf("Replay.PerSecond is %v, want a number of at least 0", r.PerSecond))
	}
	return errors.Join(errs...)
}

// Between is the time from one returned message to the next, 365 days at most; 0: no bound.
func (r Replay[M]) Between() time.Duration {
	if r.PerSecond == 0 {
		return 0
	}
	return time.Duration(min(float64(time.Second)/r.PerSecond, float64(365*24*time.Hour)))
}

// Check returns every violation of a Removal.
func (r Removal) Check() error {
	return actor.Check("Removal.By", "Removal.Reason", r.By, r.Reason)
}

// Outlived is the error of a replay that refused so many for their age; nil for 0.
func Outlived(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d messages: %w", n, ErrOutlived)
}

// Groups counts dead letters by their fingerprints. The zero Groups is empty, and has no bound.
type Groups[M any] struct {
	// Most is how many kinds are told apart; the others are one group more. 0: all.
	Most int

	of   map[string]*Group[M]
	rest Group[M]
}

// Add counts a dead letter. It keeps it as a sample.
func (g *Groups[M]) Add(d DeadLetter[M]) {
	if g.of == nil {
		g.of = map[string]*Group[M]{}
	}
	group := g.of[d.Fingerprint]
	switch {
	case group != nil:
	case g.Most == 0 || len(g.of) < g.Most:
		group = &Group[M]{Fingerprint: d.Fingerprint}
		g.of[d.Fingerprint] = group
	default:
		group = &g.rest
	}
	group.Count++
	if group.First.IsZero() || d.FailedAt.Before(group.First) {
		group.First = d.FailedAt
	}
	if group.Count == 1 || !d.FailedAt.Before(group.Last) {
		group.Last, group.Sample = d.FailedAt, d
	}
}

// Largest returns the groups, the one with the most dead letters first; 0 means all.
func (g *Groups[M]) Largest(most int) []Group[M] {
	var all []Group[M]
	for _, group := range g.of {
		all = append(all, *group)
	}
	if g.rest.Count > 0 {
		all = append(all, g.rest)
	}
	slices.SortFunc(all, func(a, b Group[M]) int {
		return cmp.Or(b.Count-a.Count, strings.Compare(a.Fingerprint, b.Fingerprint))
	})
	if most > 0 {
		all = all[:min(len(all), most)]
	}
	return all
}

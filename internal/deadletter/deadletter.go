// Package deadletter has the parts that dead letters of an outbox and of a consumer share: the types, which packages outbox
// and inbox export under the same names, the validation of arguments, and the steps in which a store changes many dead
// letters. M is the message type of the core.
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
	// ErrNotFound means that no dead letter has the id.
	ErrNotFound = errors.New("no such dead letter")
	// ErrOutlived means that a replay left dead letters in place because they are older than the consumer's record of
	// processed messages. Replay.Force returns them too.
	ErrOutlived = errors.New("dead letters are older than the memory of processed messages")
)

const (
	// ListLimit is the limit of a List whose filter sets none.
	ListLimit = 100
	// GroupsLimit is the limit of a Groups whose filter sets none. A consumer also distinguishes at most this many groups.
	GroupsLimit = 1000
	// Retention is the default time for which consumers record processed messages.
	Retention = 8 * 24 * time.Hour
	// ListBytes bounds the total size of the bodies of one List.
	ListBytes = 32 << 20

	maxIDs  = 10_000
	maxText = 1000
)

// DeadLetters shows and moves the messages that relays or a consumer gave up. It is safe for concurrent use.
//
// The methods Parked of an outbox and Retrying of a consumer return the same methods for messages that wait for an
// attempt. Such a message has a DueAt. Replay changes it and keeps the attempts; a message that is delivered meanwhile
// is not counted. Replay.Edit is rejected.
type DeadLetters[M any] interface {
	// List returns the dead letters that f selects. A list of an outbox starts with the oldest.
	List(ctx context.Context, f Filter) ([]DeadLetter[M], error)
	// Show returns one whole dead letter, or ErrNotFound. If several have the id, it returns the latest.
	Show(ctx context.Context, id uuid.UUID) (DeadLetter[M], error)
	// Count returns how many dead letters f selects. Filter.Limit bounds the count.
	Count(ctx context.Context, f Filter) (int, error)
	// Groups counts the selected dead letters by their fingerprints, the largest group first. Filter.Limit bounds the number
	// of groups; 0 means 1,000. A consumer distinguishes 1,000 kinds and counts the rest in one more group without a
	// fingerprint.
	Groups(ctx context.Context, f Filter) ([]Group[M], error)
	// Replay turns the selected dead letters into messages again and forgets their attempts. Dead letters of an outbox are
	// published again, dead letters of a consumer return to the queues they came from. Replay selects among the dead letters
	// that exist when it starts. A dead letter that cannot be returned stays and does not stop the others; the error then
	// names the first one. With any other error, Replayed counts the changes made until then. If the server does not answer,
	// some more may have moved: calling again does no harm.
	//
	// An outbox moves at most 500 in one transaction. They keep the order in which they were stored, and come after all
	// messages that the outbox holds at that time. Messages written meanwhile may come between them. A message of a consumer
	// that fails again is a dead letter again: exclude it from a second call with Filter.FailedBefore.
	Replay(ctx context.Context, f Filter, r Replay[M]) (Replayed, error)
	// Remove deletes the selected dead letters and returns how many, also with an error. An outbox deletes the oldest first,
	// at most 500 in one transaction. Remove treats failures as Replay does. A copy of a removed message that a broker still
	// redelivers, because its process was lost before the ack, runs unless the dead letter had stopped its key.
	Remove(ctx context.Context, f Filter, r Removal) (int, error)
}

// DeadLetter is a message that was given up, with the reason.
type DeadLetter[M any] struct {
	// Message is the message as it was stored, or as it last arrived.
	Message M
	// Class is the kind of the last failure, such as "permanent", "unroutable" or "validation". It selects the dead-letter
	// queue of a consumer.
	Class string
	// Error is the text of the last failure, at most 1,024 bytes of UTF-8. Message.History of a consumer has the earlier
	// failures.
	Error string
	// ErrorType is the Go type of a handler's last failure, such as *pgconn.PgError: the first error in the chain that is
	// not a wrapper of packages fmt, errors and inbox. SQLState is its SQLSTATE. Both are empty if there is none or it is
	// unknown.
	ErrorType, SQLState string
	// Fingerprint is the same for failures of one kind, in all processes and versions of a program. It has 16 digits, hashed
	// from the class, the transport, the message's name and the error's text; or from the class, the error's type and
	// SQLSTATE, and the function that panicked or the message's name. Quotations in a text and words with a digit are
	// ignored.
	Fingerprint string
	// Attempts counts the failed attempts.
	Attempts int
	// CreatedAt is when the outbox stored the message; zero for a consumer.
	CreatedAt time.Time `json:",omitzero"`
	// FirstFailedAt and FailedAt are the times of the first and the last failure. An outbox has the last one only. The times
	// of an outbox come from the store's clock; they are zero if another program has set them to infinity.
	FirstFailedAt, FailedAt time.Time
	// DueAt is when the next attempt of a waiting message is due; zero for a dead letter.
	DueAt time.Time `json:",omitzero"`
	// Consumer names the consumer that gave the message up.
	Consumer string
	// Omitted means that List left out the body and the headers.
	Omitted bool
	// Unreadable is the reason why an outbox's Message is incomplete: another program stored something else, or the bodies
	// of one List exceed 32 MiB together. Replay moves the row unchanged. Nil: the Message is complete.
	Unreadable error `json:"-"`
	// Cursor is the position of the dead letter in a List of an outbox. Used as Filter.After, it starts another List after
	// this position, even if the dead letter is gone. Only the store can read it.
	Cursor string `json:",omitempty"`
}

// Group is a set of dead letters of one kind.
type Group[M any] struct {
	// Fingerprint is the fingerprint that all of them have; Filter.Fingerprint selects them.
	Fingerprint string
	// Count is the number of dead letters.
	Count int
	// First and Last are the earliest and the latest FailedAt among them.
	First, Last time.Time
	// Sample is the latest dead letter of the group, without the body and the headers of its message.
	Sample DeadLetter[M]
}

// Filter selects the dead letters that match every field that is set. The zero Filter selects all.
type Filter struct {
	// IDs selects by message id, at most 10,000. Ids without a dead letter are ignored. Nil: any.
	IDs []uuid.UUID `json:"ids,omitempty"`
	// Class, Name and Key select by equality. Optional.
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
	// Limit is the maximum number of dead letters to list, count, return or remove; an outbox takes the oldest. Dead letters
	// that a consumer's replay leaves in place do not count. Default: 100 for List, 1,000 for Groups, none for the others.
	Limit int `json:"limit,omitempty"`
	// After is the Cursor of a dead letter: a List of an outbox starts after it. All other calls reject it, because dead
	// letters in a queue have no lasting position. A dead letter that is stored meanwhile may lie before the position; a
	// List from the start shows it.
	After string `json:"-"`
	// Whole makes a List include bodies and headers, until they are 32 MiB together.
	Whole bool `json:"-"`
}

// Replay holds the arguments of DeadLetters.Replay: who returns dead letters, and how.
type Replay[M any] struct {
	// By and Reason are as in Removal. A DryRun needs no By.
	By, Reason string
	// PerSecond bounds how many return per second. Default: no bound. Waiting messages get due times at this rate; on
	// RabbitMQ several arrive together, because its delays have fixed steps.
	PerSecond float64
	// Delay makes waiting messages due that much later than now, at most 24 hours. Default: now. Dead letters have none.
	Delay time.Duration
	// DryRun counts and moves nothing. A dry run of a consumer does not notice that a queue is gone.
	DryRun bool
	// Progress is called with the running totals after each step of an outbox, and after each message of a consumer, by the
	// goroutine that called Replay. A DryRun of an outbox has steps only with Edit. Optional.
	Progress func(Replayed)
	// Edit returns the new body of a message, or an error: then the message stays and counts as failed. A DryRun calls it
	// too. It must not change its argument. With Edit an outbox moves 20 at a time. Optional.
	//
	// A message keeps its id, so that it is not processed again if it was processed after all. The bodies of structured
	// CloudEvents, and of messages that Symfony has wrapped for a Redis stream, cannot be replaced: such messages stay.
	Edit func(M) ([]byte, error)
	// Force also returns dead letters that the consumer may have forgotten: messages that an outbox stored more than 8 days
	// ago, and messages sent before the consumer's retention. Such a message may have taken effect although its confirm or
	// ack was lost. It may then take effect again.
	Force bool
}

// Removal holds the arguments of DeadLetters.Remove: who deletes dead letters, and why.
type Removal struct {
	// By names the person or program and is required, 1 to 128 bytes; Reason is optional, at most 1,000 bytes. Both are
	// UTF-8 without control characters. Postgres keeps them in an audit table, a consumer logs them.
	By, Reason string
	// Progress is called like Replay.Progress, with the number deleted so far. Optional.
	Progress func(removed int)
}

// Replayed counts the outcomes of the dead letters that a replay selected.
type Replayed struct {
	// Returned counts those that are messages again, or would be with DryRun.
	Returned int
	// Outlived counts those rejected because of their age. They stay, and the error of Replay is ErrOutlived.
	Outlived int
	// Failed counts those that could not be edited or returned. They stay. An outbox also counts those whose id it already
	// holds again.
	Failed int
}

// Check returns every violation of a Filter for all calls except List.
func (f Filter) Check() error {
	var errs []error
	if f.After != "" {
		errs = append(errs, errors.New("Filter.After is only for a List of an outbox"))
	}
	return errors.Join(append(errs, f.CheckList())...)
}

// CheckList returns every violation of a Filter for a List. It does not check the cursor.
func (f Filter) CheckList() error {
	var errs []error
	if f.Limit < 0 {
		errs = append(errs, fmt.Errorf("Filter.Limit is %d, want 0 or more", f.Limit))
	}
	if len(f.IDs) > maxIDs {
		errs = append(errs, fmt.Errorf("Filter.IDs has %d entries, at most %d are allowed", len(f.IDs), maxIDs))
	}
	if max(len(f.Class), len(f.Name), len(f.Key), len(f.Fingerprint), len(f.ErrorContains)) > maxText {
		errs = append(errs, fmt.Errorf("Filter has a text longer than %d bytes", maxText))
	}
	return errors.Join(errs...)
}

// Matches reports whether a filter selects the dead letter of a message. It ignores Limit and After.
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
	if !(r.PerSecond >= 0) || math.IsInf(r.PerSecond, 0) { // this form rejects NaN, too
		errs = append(errs, fmt.Errorf("Replay.PerSecond is %v, want a number of at least 0", r.PerSecond))
	}
	return errors.Join(errs...)
}

// maxDelay bounds a Replay.Delay.
const maxDelay = 24 * time.Hour

// CheckDead returns every violation of a Replay of dead letters.
func (r Replay[M]) CheckDead() error {
	var err error
	if r.Delay != 0 {
		err = errors.New("Replay.Delay is only for waiting messages")
	}
	return errors.Join(err, r.Check())
}

// CheckWaiting returns every violation of a Replay of waiting messages.
func (r Replay[M]) CheckWaiting() error {
	var errs []error
	if r.Delay < 0 || r.Delay > maxDelay {
		errs = append(errs, fmt.Errorf("Replay.Delay is %v, want 0 to %v", r.Delay, maxDelay))
	}
	if r.Edit != nil {
		errs = append(errs, errors.New("Replay.Edit is only for dead letters"))
	}
	return errors.Join(append(errs, r.Check())...)
}

// Between returns the time between two returned messages, at most 365 days; 0: no bound.
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

// Outlived returns the error of a replay that rejected n dead letters because of their age; nil for 0.
func Outlived(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d messages: %w", n, ErrOutlived)
}

// Groups counts dead letters by their fingerprints. The zero Groups is empty, and has no bound.
type Groups[M any] struct {
	// Most is how many kinds are distinguished; the rest is one more group. 0: all.
	Most int

	of   map[string]*Group[M]
	rest Group[M]
}

// Add counts a dead letter and may keep it as the sample of its group.
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

// Largest returns the groups with the most dead letters, the largest first, at most most of them; 0 means all.
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

package core

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Selection chooses dead letters: those that match all that is set.
type Selection struct {
	IDs           []uuid.UUID
	Name, Key     string
	Class, Group  string
	ErrorContains string
	After, Before time.Time
	Limit         int
	// Behind is the Cursor of a letter of an outbox, behind which a list begins. Only a list has it.
	Behind string
}

// ParseMoment reads a time, or how long ago it was.
func ParseMoment(text string) (time.Time, error) {
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
func (s Selection) String() string {
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
		add("since", Moment(s.After))
	}
	if !s.Before.IsZero() {
		add("until", Moment(s.Before))
	}
	if s.Limit > 0 {
		words = append(words, fmt.Sprintf("--limit=%d", s.Limit))
	}
	if len(words) == 0 {
		return "--all"
	}
	return strings.Join(words, " ")
}

// Chooses reports whether anything is chosen: nothing is all.
func (s Selection) Chooses() bool { return s.String() != "--all" }

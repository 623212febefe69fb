package operator

import (
	"fmt"

	"github.com/google/uuid"
)

// mostForAgents is how many letters a tool lists at most: an agent reads all of them.
const mostForAgents = 100

// chosenLetters are the dead letters that an agent chooses: those that match all that is set.
type chosenLetters struct {
	From  []string `json:"from,omitempty" jsonschema:"only of these outboxes and consumers, by the names that status tells"`
	IDs   []string `json:"ids,omitempty" jsonschema:"only these messages, by their ids"`
	Name  string   `json:"name,omitempty" jsonschema:"only messages of this name"`
	Key   string   `json:"key,omitempty" jsonschema:"only messages of this ordering key"`
	Class string   `json:"class,omitempty" jsonschema:"only failures of this class"`
	Group string   `json:"group,omitempty" jsonschema:"only failures of this group, by the fingerprint that groups tells"`
	Error string   `json:"error,omitempty" jsonschema:"only failures with this text in the error"`
	Since string   `json:"since,omitempty" jsonschema:"only failures since then: 2h for two hours ago, or 2026-01-02T15:04:05Z"`
	Until string   `json:"until,omitempty" jsonschema:"only failures before then"`
	Limit int      `json:"limit,omitempty" jsonschema:"at most so many of each outbox and consumer, of an outbox the oldest"`
}

// selection is what is chosen, and of which places.
func (c chosenLetters) selection(o *Operator) ([]place, selection, error) {
	s := selection{Name: c.Name, Key: c.Key, Class: c.Class, Group: c.Group, ErrorContains: c.Error, Limit: c.Limit}
	places, err := o.chosen(&placeFlag{c.From}, "")
	if err != nil {
		return nil, s, err
	}
	for _, text := range c.IDs {
		id, err := uuid.Parse(text)
		if err != nil {
			return nil, s, fmt.Errorf("%.40q is not an id", text)
		}
		s.IDs = append(s.IDs, id)
	}
	if c.Limit < 0 {
		return nil, s, fmt.Errorf("limit is %d", c.Limit)
	}
	if s.After, err = parseMoment(c.Since); err != nil {
		return nil, s, fmt.Errorf("since: %w", err)
	}
	if s.Before, err = parseMoment(c.Until); err != nil {
		return nil, s, fmt.Errorf("until: %w", err)
	}
	return places, s, nil
}

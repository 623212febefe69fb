// Package actor describes who changes or pauses something, and why, and validates the two texts.
package actor

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Pause records who paused something, why and when. The zero value means not paused.
type Pause struct {
	By     string    `json:"by"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
}

const (
	maxBy     = 128
	maxReason = 1000
)

// Check returns every violation in one error. The error names the fields byName and reasonName.
func Check(byName, reasonName, by, reason string) error {
	var problems []error
	if by == "" || len(by) > maxBy || !plain(by) {
		problems = append(problems, fmt.Errorf("%s wants 1 to %d bytes of UTF-8 without control characters", byName, maxBy))
	}
	if len(reason) > maxReason || !plain(reason) {
		problems = append(problems, fmt.Errorf("%s wants at most %d bytes of UTF-8 without control characters", reasonName, maxReason))
	}
	return errors.Join(problems...)
}

func plain(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// Package actor checks who changes something, and why, before it is kept.
package actor

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxBy     = 128
	maxReason = 1000
)

// Check returns every violation in one error. It calls the two by their names.
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

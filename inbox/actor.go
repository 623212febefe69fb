package inbox

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

// Removal says who removes dead letters, and why. Both are written to the log.
type Removal struct {
	// By names who asks for it, and is required: 1 to 128 bytes. Reason may say why, in at most
	// 1,000 bytes. Both are UTF-8 without control characters.
	By, Reason string
}

// Validate returns every violation in one error, naming the fields.
func (r Removal) Validate() error { return checkActor("Removal", r.By, r.Reason) }

func checkActor(where, by, reason string) error {
	var problems []error
	if by == "" || len(by) > maxBy || !plainText(by) {
		problems = append(problems, fmt.Errorf("inbox: %s.By wants 1 to %d bytes of UTF-8 without control characters", where, maxBy))
	}
	if len(reason) > maxReason || !plainText(reason) {
		problems = append(problems, fmt.Errorf("inbox: %s.Reason wants at most %d bytes of UTF-8 without control characters", where, maxReason))
	}
	return errors.Join(problems...)
}

func plainText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

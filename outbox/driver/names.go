package driver

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/internal/wire"
)

const (
	maxName     = 128
	maxDedupKey = 255
)

// CheckName refuses a name that is not lower-case words of letters, digits, "_" and "-", each
// beginning with a letter or digit, joined by dots, of at most 128 bytes.
func CheckName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("has %d bytes, 1 to %d are allowed", len(name), maxName)
	}
	first := true
	for i := range len(name) {
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			first = false
		case (c == '_' || c == '-') && !first:
		case c == '.' && !first:
			first = true
		default:
			return fmt.Errorf("%q is not lower-case words joined by dots", name)
		}
	}
	if first {
		return fmt.Errorf("%q ends with a dot", name)
	}
	return nil
}

// CheckDedupKey refuses a key for writing once that is not 1 to 255 bytes of UTF-8 without control
// characters.
func CheckDedupKey(key string) error {
	if key == "" || len(key) > maxDedupKey || !utf8.ValidString(key) || strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("wants 1 to %d bytes of UTF-8 without control characters", maxDedupKey)
	}
	return nil
}

// Reserved reports whether a header name belongs to the transports or to Holdfast, so that a
// message may not carry it: "type", "CC" and "BCC" (RabbitMQ routes by them), and everything that
// begins with "holdfast-", "x-death", "x-first-death-", "x-last-death-", "x-delivery-", "x-acquired-" or "x-opt-".
// Case does not matter.
func Reserved(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "type", "cc", "bcc":
		return true
	}
	return strings.HasPrefix(name, "holdfast-") || wire.OfBroker(name)
}

package deadletter

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
)

// changing is what differs between failures of one kind: quotations, and words with a digit.
var changing = regexp.MustCompile("\"[^\"]*\"|'[^']*'|`[^`]*`|\\S*[0-9]\\S*")

// Fingerprint is outbox.DeadLetter.Fingerprint, for a store that does not reckon it itself.
func Fingerprint(class, transport, name, text string) string {
	h := fnv.New64a()
	h.Write([]byte(strings.Join([]string{class, transport, name, changing.ReplaceAllString(text, "#")}, "\n")))
	return fmt.Sprintf("%016x", h.Sum64())
}

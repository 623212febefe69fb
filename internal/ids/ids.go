// Package ids makes and checks message ids: UUID version 7 of RFC 9562. They start with a time in
// milliseconds, which keeps new ids at the right edge of an index.
package ids

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// ErrNotV7 is wrapped by every error of Check and Parse.
var ErrNotV7 = errors.New("not a UUID of version 7")

// New returns a new random id. It panics only if the operating system has no random numbers, like
// crypto/rand.
func New() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// Check returns an error unless id is a UUID of version 7 and the variant of RFC 9562.
func Check(id uuid.UUID) error {
	if id.Version() != 7 || id.Variant() != uuid.RFC4122 {
		return fmt.Errorf("id %s: %w", id, ErrNotV7)
	}
	return nil
}

// Time returns the time in an id of version 7, in milliseconds. For any other id the result is
// meaningless.
func Time(id uuid.UUID) time.Time {
	return time.UnixMilli(int64(binary.BigEndian.Uint64(id[:8]) >> 16))
}

// canonicalLength is the length of the form 8-4-4-4-12 with hexadecimal digits and hyphens.
const canonicalLength = 36

// Parse reads the canonical form of 36 characters, in upper or lower case. It rejects the other
// forms that uuid.Parse accepts: URN, braces and bare digits.
func Parse(s string) (uuid.UUID, error) {
	if len(s) != canonicalLength {
		return uuid.Nil, fmt.Errorf("id of %d characters: %w", len(s), ErrNotV7)
	}
	id, err := uuid.Parse(s)
	if err != nil {
		return uuid.Nil, fmt.Errorf("id %q: %w", s, ErrNotV7)
	}
	return id, Check(id)
}

// Deterministic returns the same version 7 id for the same input. The time is t in milliseconds,
// the other bits are the SHA-256 of t and the parts. Each part is hashed with its length, so ("a",
// "bc") and ("ab", "c") differ.
func Deterministic(t time.Time, parts ...string) uuid.UUID {
	input := binary.BigEndian.AppendUint64(make([]byte, 0, 128), uint64(t.UnixMicro()))
	for _, p := range parts {
		input = binary.BigEndian.AppendUint64(input, uint64(len(p)))
		input = append(input, p...)
	}
	sum := sha256.Sum256(input)

	var id uuid.UUID
	binary.BigEndian.PutUint64(id[:8], uint64(t.UnixMilli())<<16)
	copy(id[6:], sum[:10])
	id[6] = 0x70 | id[6]&0x0f
	id[8] = 0x80 | id[8]&0x3f
	return id
}

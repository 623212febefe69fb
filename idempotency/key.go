package idempotency

import (
	"encoding/hex"
	"log/slog"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
)

// Key names one piece of work, in the form in which stores keep it: the 32 lowercase hex
// digits of a UUID, or for an opaque key ~ and a SHA-256 in hex, alone or below a scope
// (see In). A Key logs as a short hash, never in clear.
type Key string

// NewKey makes a random key.
func NewKey() Key {
	id := uuid.New()
	return Key(hex.EncodeToString(id[:]))
}

// ParseKey reads the value of an Idempotency-Key header: 32 lowercase hex
// digits with the version nibble 4 and a variant nibble from 8 to b. The quoted
// form of the IETF draft is the same key. Everything else is ErrKeyInvalid.
//
// What ParseKey takes is the same key for [ParseUUID], and what that takes for
// [ParseOpaque]: a service may change to a wider grammar while keys are in use.
func ParseKey(header string) (Key, error) {
	s := header
	if len(s) == keys.Length+2 && s[0] == '"' && s[len(s)-1] == '"' {
		s = s[1 : len(s)-1]
	}
	if !keys.Is(s) {
		return "", errNotStrict
	}
	return Key(s), nil
}

// ParseUUID reads a UUID of RFC 9562 (versions 1 to 8) in any usual form: with or without
// hyphens, in either case, in braces, after urn:uuid:, and each of them quoted or not. All
// forms of one UUID are one key. Everything else is ErrKeyInvalid.
func ParseUUID(header string) (Key, error) {
	key, ok := keys.UUID(header)
	if !ok {
		return "", errNotUUID
	}
	return Key(key), nil
}

// ParseOpaque reads 1 to 255 visible ASCII characters, as they are or as a String of RFC
// 8941 (quoted, with a backslash before quotes and backslashes), which is the same key.
// Stores see their SHA-256; what is a UUID for [ParseUUID] is the same key as there.
// Everything else is ErrKeyInvalid.
//
// Keys that others can guess give them their answers: let a scope keep callers apart.
func ParseOpaque(header string) (Key, error) {
	key, ok := keys.Opaque(header)
	if !ok {
		return "", errNotOpaque
	}
	return Key(key), nil
}

// In returns the key below a scope such as a tenant or a user: the same key in
// two scopes is two keys. The joined text is `@scope:key`, with every byte of
// the scope outside [A-Za-z0-9._-] percent-encoded, so that no scope can be
// mistaken for another one or reach outside its part of the text; a scope
// longer than 128 bytes in that form is replaced by its SHA-256. A key that is
// in a scope already is moved to the new one.
func (k Key) In(scope string) Key { return Key(keys.In(string(k), scope)) }

// Validate returns ErrKeyInvalid unless k has the form that NewKey, In and the functions
// Parse… give it, which is safe in the name of a record.
func (k Key) Validate() error { return driver.Key(k).Validate() }

// LogValue keeps keys out of logs: whoever knows a key can ask for its answer.
func (k Key) LogValue() slog.Value { return driver.Key(k).LogValue() }

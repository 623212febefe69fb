package idempotency

import (
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
	"github.com/holdfast-go/holdfast/internal/problem"
)

// Key names one piece of work, in the form that stores keep: the 32 lowercase hex digits of a UUID, or ~ and a
// SHA-256 in hex for an opaque key. A scope may precede it (see In). A Key is logged as a short hash, never in clear.
type Key string

// NewKey returns a random key.
func NewKey() Key {
	id := uuid.New()
	return Key(hex.EncodeToString(id[:]))
}

// ParseKey reads the value of an Idempotency-Key header: 32 lowercase hex digits with the version nibble 4 and a
// variant nibble from 8 to b. The quoted form of the IETF draft is the same key. Everything else is ErrKeyInvalid.
//
// [ParseUUID] returns the same key for every value that ParseKey accepts, and [ParseOpaque] for every value that
// ParseUUID accepts. A service may change to a wider grammar while keys are in use.
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

// ParseUUID reads a UUID of RFC 9562 (versions 1 to 8) in any usual form: with or without hyphens, in upper or lower
// case, in braces, after urn:uuid:, quoted or not. All forms of a UUID are one key. Everything else is ErrKeyInvalid.
func ParseUUID(header string) (Key, error) {
	key, ok := keys.UUID(header)
	if !ok {
		return "", errNotUUID
	}
	return Key(key), nil
}

// ParseOpaque reads 1 to 255 visible ASCII characters, bare or as a String of RFC 8941 (quoted, with a backslash
// before quotes and backslashes). Both forms are the same key. Stores see the SHA-256 of the key. A UUID gives the
// same key as [ParseUUID]. Everything else is ErrKeyInvalid.
//
// Whoever guesses a key could read its answer, so keep callers apart by a scope.
func ParseOpaque(header string) (Key, error) {
	key, ok := keys.Opaque(header)
	if !ok {
		return "", errNotOpaque
	}
	return Key(key), nil
}

// In returns the key below a scope such as a tenant or a user: the same key in two scopes is two keys. The joined
// text is `@scope:key`, with every byte of the scope outside [A-Za-z0-9._-] percent-encoded, so that no scope can be
// mistaken for another one or escape its part of the text. A scope longer than 128 bytes in that form is replaced by
// its SHA-256. A key that already has a scope is moved to the new scope.
func (k Key) In(scope string) Key { return Key(keys.In(string(k), scope)) }

// Validate returns ErrKeyInvalid unless k has the form that NewKey, In and the Parse functions return. That form is
// safe in the name of a record.
func (k Key) Validate() error { return driver.Key(k).Validate() }

// LogValue keeps keys out of logs, because whoever has a key can request its answer.
func (k Key) LogValue() slog.Value { return driver.Key(k).LogValue() }

// grammarError is ErrKeyInvalid with the required form of a key.
type grammarError struct {
	*coded
	form string
}

func (e *grammarError) Is(target error) bool { return target == ErrKeyInvalid }

// Errors of the Parse functions.
var (
	errNotStrict = notOfForm("a UUID v4 in lowercase and without hyphens, such as a0eebc999c0b4ef8bb6d6bb9bd380a11")
	errNotUUID   = notOfForm("a UUID, such as a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
	errNotOpaque = notOfForm("1 to 255 visible ASCII characters, in quotes or without")
)

func notOfForm(form string) error {
	return &grammarError{form: form, coded: &problem.Error{
		Text: "idempotency: key is not " + form,
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be sent exactly once: " + form + ".",
		},
	}}
}

// keyReader reads the key from the values of a header.
type keyReader struct {
	parse    func(header string) (Key, error)
	required error // for a request without a key
	several  error // for a request with more than one key: two readers might choose different ones
}

func newKeyReader(parse func(string) (Key, error)) keyReader {
	r := keyReader{parse: parse, several: ErrKeyInvalid}
	if _, err := parse(""); err != nil { // the error names the form of a key
		r.several = invalid(err)
	}
	ask := "This request needs the header Idempotency-Key"
	if known, ok := errors.AsType[*grammarError](r.several); ok {
		ask += ": " + known.form
	}
	r.required = &problem.Error{
		Text:    "idempotency: no key",
		Problem: problem.Problem{Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_REQUIRED", Detail: ask + "."},
	}
	return r
}

func (r keyReader) read(values []string) (Key, error) {
	switch len(values) {
	case 0:
		return "", r.required
	case 1:
	default:
		return "", r.several
	}
	key, err := r.parse(values[0])
	if err == nil {
		err = key.Validate()
	}
	if err != nil {
		return "", invalid(err)
	}
	return key, nil
}

// invalid turns the error of a user's ParseKey into an ErrKeyInvalid, unless it already has a problem.
func invalid(err error) error {
	if _, known := problem.Of(err); known {
		return err
	}
	return fmt.Errorf("%w: %w", ErrKeyInvalid, err)
}

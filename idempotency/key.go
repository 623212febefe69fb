package idempotency

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strings"

	"github.com/google/uuid"
)

// Key names one piece of work. It is the 32 lowercase hex digits of a UUID v4,
// alone or below a scope (see In). A Key logs as a short hash, never in clear.
type Key string

const (
	keyLength = 32
	// maxScopeLength bounds the readable form of a scope; longer ones are hashed.
	maxScopeLength = 128
)

// NewKey makes a random key.
func NewKey() Key {
	id := uuid.New()
	return Key(hex.EncodeToString(id[:]))
}

// ParseKey reads the value of an Idempotency-Key header: 32 lowercase hex
// digits with the version nibble 4 and a variant nibble from 8 to b. The quoted
// form of the IETF draft is the same key. Everything else is ErrKeyInvalid.
func ParseKey(header string) (Key, error) {
	s := header
	if len(s) == keyLength+2 && s[0] == '"' && s[len(s)-1] == '"' {
		s = s[1 : len(s)-1]
	}
	if !isKey(s) {
		return "", ErrKeyInvalid
	}
	return Key(s), nil
}

// In returns the key below a scope such as a tenant or a user: the same key in
// two scopes is two keys. The joined text is `@scope:key`, with every byte of
// the scope outside [A-Za-z0-9._-] percent-encoded, so that no scope can be
// mistaken for another one or reach outside its part of the text; a scope
// longer than 128 bytes in that form is replaced by its SHA-256. A key that is
// in a scope already is moved to the new one.
func (k Key) In(scope string) Key {
	return Key("@" + encodeScope(scope) + ":" + string(k.bare()))
}

// Validate returns ErrKeyInvalid unless k has the form that ParseKey, NewKey and
// In give it, which is safe in the name of a record.
func (k Key) Validate() error {
	if !isKey(string(k.bare())) {
		return ErrKeyInvalid
	}
	scope := strings.TrimSuffix(string(k), string(k.bare()))
	if scope == "" {
		return nil
	}
	inner, ok := strings.CutPrefix(scope, "@")
	inner, ok2 := strings.CutSuffix(inner, ":")
	if !ok || !ok2 || len(inner) > maxScopeLength || strings.ContainsFunc(inner, notInScope) {
		return ErrKeyInvalid
	}
	return nil
}

// LogValue keeps keys out of logs: whoever knows a key can ask for its answer.
func (k Key) LogValue() slog.Value {
	sum := sha256.Sum256([]byte(k))
	return slog.StringValue("sha256:" + hex.EncodeToString(sum[:8]))
}

// child returns the key of the part of that name.
func (k Key) child(name string) Key {
	sum := sha256.Sum256([]byte("idempotency child\x00" + string(k) + "\x00" + name))
	id := sum[:16]
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // what makes it a UUID v4
	return Key(hex.EncodeToString(id))
}

func (k Key) bare() Key {
	if len(k) <= keyLength {
		return k
	}
	return k[len(k)-keyLength:]
}

func isKey(s string) bool {
	if len(s) != keyLength || s[12] != '4' || strings.IndexByte("89ab", s[16]) < 0 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func encodeScope(scope string) string {
	var b strings.Builder
	for i := range len(scope) {
		if c := scope[i]; plainInScope(c) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
		if b.Len() > maxScopeLength {
			sum := sha256.Sum256([]byte(scope))
			return "~" + hex.EncodeToString(sum[:])
		}
	}
	return b.String()
}

func plainInScope(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
		c == '.' || c == '_' || c == '-'
}

func notInScope(r rune) bool {
	return r > 127 || !plainInScope(byte(r)) && r != '%' && r != '~'
}

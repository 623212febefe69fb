// Package keys knows the grammars of idempotency keys, and the form in which they are kept.
package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	// Length is that of a UUID as it is kept.
	Length = 32
	// maxScopeLength bounds the readable form of a scope; longer ones are hashed.
	maxScopeLength = 128
)

// Is reports whether s is a UUID v4 in the form in which it is kept.
func Is(s string) bool { return digits(s) && s[12] == '4' }

// Valid reports whether key is in the form in which keys are kept, alone or below a scope.
func Valid(key string) bool {
	scope, rest := cut(key)
	if !digits(rest) && !isHash(rest) {
		return false
	}
	inner, scoped := strings.CutPrefix(scope, "@")
	return !scoped || len(inner) <= maxScopeLength && !strings.ContainsFunc(inner, notInScope)
}

// In returns the key below a scope. A key that is in one already is moved.
func In(key, scope string) string {
	_, rest := cut(key)
	return "@" + encodeScope(scope) + ":" + rest
}

// Hash returns what a log shows of a key.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:8])
}

// Child returns the key of the part of that name.
func Child(key, name string) string {
	sum := sha256.Sum256([]byte("idempotency child\x00" + key + "\x00" + name))
	id := sum[:16]
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // what makes it a UUID v4
	return hex.EncodeToString(id)
}

// cut returns the scope with its mark, or nothing, and the rest of the key.
func cut(key string) (scope, rest string) {
	if !strings.HasPrefix(key, "@") {
		return "", key
	}
	scope, rest, _ = strings.Cut(key, ":")
	return scope, rest
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

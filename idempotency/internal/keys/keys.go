// Package keys knows the grammar of idempotency keys.
package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	// Length is that of a key without a scope.
	Length = 32
	// maxScopeLength bounds the readable form of a scope; longer ones are hashed.
	maxScopeLength = 128
)

// Is reports whether s is a key without a scope.
func Is(s string) bool {
	if len(s) != Length || s[12] != '4' || strings.IndexByte("89ab", s[16]) < 0 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Valid reports whether key is one, alone or below a scope.
func Valid(key string) bool {
	if !Is(bare(key)) {
		return false
	}
	scope := strings.TrimSuffix(key, bare(key))
	if scope == "" {
		return true
	}
	inner, ok := strings.CutPrefix(scope, "@")
	inner, ok2 := strings.CutSuffix(inner, ":")
	return ok && ok2 && len(inner) <= maxScopeLength && !strings.ContainsFunc(inner, notInScope)
}

// In returns the key below a scope. A key that is in one already is moved.
func In(key, scope string) string { return "@" + encodeScope(scope) + ":" + bare(key) }

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

func bare(key string) string {
	if len(key) <= Length {
		return key
	}
	return key[len(key)-Length:]
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

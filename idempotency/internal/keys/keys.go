// Package keys has the grammars of idempotency keys and the form in which keys are stored.
package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	// Length is the length of a stored UUID.
	Length = 32
	// maxScopeLength limits the readable form of a scope; longer scopes are hashed.
	maxScopeLength = 128
)

// Is reports whether s is a UUID v4 in stored form.
func Is(s string) bool { return digits(s) && s[12] == '4' }

// Valid reports whether key is in stored form, with or without a scope.
func Valid(key string) bool {
	scope, rest := cut(key)
	if !digits(rest) && !isHash(rest) {
		return false
	}
	inner, scoped := strings.CutPrefix(scope, "@")
	return !scoped || len(inner) <= maxScopeLength && !strings.ContainsFunc(inner, notInScope)
}

// In returns the key below a scope. A key that already has a scope is moved.
func In(key, scope string) string {
	_, rest := cut(key)
	return "@" + encodeScope(scope) + ":" + rest
}

// Hash returns the form of a key for logs.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:8])
}

// Child returns the key of the part called name.
func Child(key, name string) string {
	sum := sha256.Sum256([]byte("idempotency child\x00" + key + "\x00" + name))
	id := sum[:16]
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // the version and variant of a UUID v4
	return hex.EncodeToString(id)
}

// cut returns the scope with its mark (empty if there is none) and the rest of the key.
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

// maxOpaqueLength limits the characters of an opaque key.
const maxOpaqueLength = 255

// UUID returns the stored form of a UUID in any usual form, quoted or not.
func UUID(header string) (key string, ok bool) {
	text, ok := unquote(header)
	if !ok {
		return "", false
	}
	return uuid(text)
}

// Opaque returns the stored form of 1 to 255 visible characters, quoted or not. It is the same as for UUID if they
// are a UUID, else a hash. So no text of a client gets into the name of a record, and every header that UUID accepts
// gives the same key here.
func Opaque(header string) (key string, ok bool) {
	text, ok := unquote(header)
	if !ok || text == "" || len(text) > maxOpaqueLength || strings.ContainsFunc(text, invisible) {
		return "", false
	}
	if key, ok := uuid(text); ok {
		return key, true
	}
	sum := sha256.Sum256([]byte(text))
	return hashMark + hex.EncodeToString(sum[:]), true
}

// hashMark distinguishes a hash from the digits of a UUID.
const hashMark = "~"

func isHash(s string) bool {
	sum, ok := strings.CutPrefix(s, hashMark)
	return ok && len(sum) == hex.EncodedLen(sha256.Size) && isHex(sum)
}

func invisible(r rune) bool { return r <= ' ' || r > '~' }

const urn = "urn:uuid:"

func uuid(text string) (string, bool) {
	if len(text) > len(urn) && strings.EqualFold(text[:len(urn)], urn) {
		text = text[len(urn):]
	} else if strings.HasPrefix(text, "{") && strings.HasSuffix(text, "}") {
		text = text[1 : len(text)-1]
	}
	if parts := strings.Split(text, "-"); len(text) == Length+4 && len(parts) == 5 &&
		len(parts[0]) == 8 && len(parts[1]) == 4 && len(parts[2]) == 4 && len(parts[3]) == 4 {
		text = strings.Join(parts, "")
	}
	text = strings.ToLower(text)
	return text, digits(text)
}

// digits reports whether s is a UUID of RFC 9562 in 32 lowercase hex digits.
func digits(s string) bool {
	return len(s) == Length && s[12] >= '1' && s[12] <= '8' && strings.IndexByte("89ab", s[16]) >= 0 && isHex(s)
}

func isHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// unquote returns the content of a String of RFC 8941. It returns text without outer quotes unchanged.
func unquote(header string) (text string, ok bool) {
	if !strings.HasPrefix(header, `"`) && !strings.HasSuffix(header, `"`) {
		return header, true
	}
	if len(header) < 2 || header[0] != '"' || header[len(header)-1] != '"' {
		return "", false
	}
	var b strings.Builder
	for rest := header[1 : len(header)-1]; rest != ""; rest = rest[1:] {
		switch {
		case rest[0] == '"':
			return "", false
		case rest[0] != '\\':
		case len(rest) < 2 || rest[1] != '"' && rest[1] != '\\':
			return "", false
		default:
			rest = rest[1:]
		}
		b.WriteByte(rest[0])
	}
	return b.String(), true
}

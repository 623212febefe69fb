package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// maxOpaqueLength bounds the characters of an opaque key.
const maxOpaqueLength = 255

// UUID returns the kept form of a UUID that is written in any usual form, quoted or not.
func UUID(header string) (key string, ok bool) {
	text, ok := unquote(header)
	if !ok {
		return "", false
	}
	return uuid(text)
}

// Opaque returns the kept form of 1 to 255 visible characters, quoted or not: that of UUID
// if they are one, else a hash. So no text of a client gets into the name of a record, and
// every header that UUID takes is the same key here.
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

// hashMark sets a hash apart from the digits of a UUID.
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

// unquote returns what a String of RFC 8941 stands for, and text without quotes at its ends
// as it is.
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

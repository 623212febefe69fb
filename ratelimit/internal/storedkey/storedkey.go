// Package storedkey encodes keys for stores.
package storedkey

import (
	"crypto/sha256"
	"encoding/hex"
)

// maxKey is the length of the longest key that is stored unchanged.
const maxKey = 64

// Encode returns the stored form of a key; see driver.EncodeKey.
func Encode(key string) string {
	if key == "" || plainKey(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "h-" + hex.EncodeToString(sum[:16])
}

func plainKey(key string) bool {
	if !Short(key) {
		return false
	}
	for i := range len(key) {
		c := key[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// Short reports whether a key is short enough to be stored unchanged and does not look like a hash.
func Short(key string) bool {
	return len(key) <= maxKey && (len(key) < 2 || key[:2] != "h-")
}

package driver

import "github.com/holdfast-go/holdfast/idempotency/internal/sum"

// Fingerprint tells whether two requests with one key are the same request. The
// zero value fits every request: it is what a record has that was written by a
// system without fingerprints.
type Fingerprint struct {
	// Version names the way the second half of Sum was made.
	Version int
	// Sum is 64 hex digits. The first half stands for who asks for what and is
	// always compared. The second half stands for the body and is compared within
	// one Version, so that an upgrade refuses no running key.
	Sum string
}

// FingerprintOf hashes parts (SHA-256 over length-prefixed parts), for work
// that does not come over HTTP. All of it is always compared.
func FingerprintOf(parts ...string) Fingerprint {
	version, digits := sum.OfParts(parts)
	return Fingerprint{Version: version, Sum: digits}
}

// Conflicts reports whether f and other surely belong to different requests.
func (f Fingerprint) Conflicts(other Fingerprint) bool {
	if f.Sum == "" || other.Sum == "" {
		return false
	}
	target, body := f.halves()
	otherTarget, otherBody := other.halves()
	return target != otherTarget || f.Version == other.Version && body != otherBody
}

func (f Fingerprint) halves() (target, body string) {
	n := min(sum.Half, len(f.Sum))
	return f.Sum[:n], f.Sum[n:]
}

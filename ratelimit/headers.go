package ratelimit

import (
	"net/http"
	"strconv"
	"time"
)

// Headers says which header fields tell clients of their limits. The draft is
// not final: its version is in the constant's name, so that a new one changes
// nobody's answers unasked.
type Headers uint8

const (
	// HeadersDraft10 sends RateLimit-Policy and RateLimit as version 10 of
	// draft-ietf-httpapi-ratelimit-headers has them: every limit in a structured
	// list, q its quota, w its window in seconds, r what remains, t the seconds until
	// more comes. It is the default.
	HeadersDraft10 Headers = iota
	// HeadersLegacy sends X-RateLimit-Limit, X-RateLimit-Remaining and
	// X-RateLimit-Reset, in seconds from now, of the limit that is nearest to its end.
	HeadersLegacy
	// HeadersBoth sends both.
	HeadersBoth
	// HeadersNone sends neither. Retry-After is sent all the same.
	HeadersNone
)

func (f Headers) write(h http.Header, d Decision) {
	if f == HeadersDraft10 || f == HeadersBoth {
		writeDraft10(h, d)
	}
	if f == HeadersLegacy || f == HeadersBoth {
		writeLegacy(h, d)
	}
}

func writeDraft10(h http.Header, d Decision) {
	var policySpace, stateSpace [128]byte
	policy, state := policySpace[:0], stateSpace[:0]
	for i, p := range d.parts() {
		s := d.state(p)
		if d.outdone(i, s) {
			continue
		}
		if len(policy) > 0 {
			policy, state = append(policy, ", "...), append(state, ", "...)
		}
		policy = appendItem(policy, s.Name, ";q=", s.Max, ";w=", s.Window)
		state = appendItem(state, s.Name, ";r=", s.Remaining, ";t=", s.Reset)
	}
	if len(policy) > 0 {
		h.Set("RateLimit-Policy", string(policy))
		h.Set("RateLimit", string(state))
	}
}

// outdone reports whether another part of the same limit, charged for another
// key, is nearer to its end: the draft wants one item per limit.
func (d *Decision) outdone(i int, s State) bool {
	for j, p := range d.parts() {
		if j == i || p.rule.Name != s.Name {
			continue
		}
		if left := d.state(p).Remaining; left < s.Remaining || left == s.Remaining && j < i {
			return true
		}
	}
	return false
}

// appendItem needs no escapes: names are plain.
func appendItem(b []byte, name, of string, n int64, within string, d time.Duration) []byte {
	b = append(append(append(b, '"'), name...), '"')
	b = strconv.AppendInt(append(b, of...), n, 10)
	return strconv.AppendInt(append(b, within...), seconds(d), 10)
}

func writeLegacy(h http.Header, d Decision) {
	s, ok := d.Binding()
	if !ok {
		return
	}
	h.Set("X-RateLimit-Limit", strconv.FormatInt(s.Max, 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(s.Remaining, 10))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(seconds(s.Reset), 10))
}

// seconds rounds up, so that a client which obeys is never too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

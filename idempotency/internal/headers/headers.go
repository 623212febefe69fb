// Package headers encodes the headers of a response for stores: as a JSON object of lists of strings.
package headers

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// Encode returns h as JSON. HTTP allows values that are not UTF-8, which JSON cannot hold; they are written as
// {"base64": …}.
func Encode(h http.Header) (string, error) {
	if len(h) == 0 {
		return "{}", nil
	}
	if text, ok := encodePlain(h); ok {
		return text, nil
	}
	text, err := json.Marshal(encodable(h))
	if err != nil {
		return "", fmt.Errorf("encode headers: %w", err)
	}
	return string(text), nil
}

// Decode reads the output of Encode.
func Decode(text string) (http.Header, error) {
	if text == "" || text == "{}" {
		return nil, nil
	}
	if h, ok := decodePlain(text); ok {
		return h, nil
	}
	if !strings.Contains(text, `{"base64"`) {
		var h http.Header
		err := json.Unmarshal([]byte(text), &h)
		return h, err
	}
	var raw map[string][]value
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, err
	}
	h := make(http.Header, len(raw))
	for name, values := range raw {
		h[name] = nil // keeps a name without values
		for _, v := range values {
			h[name] = append(h[name], string(v))
		}
	}
	return h, nil
}

func encodable(h http.Header) any {
	for _, values := range h {
		for _, v := range values {
			if !utf8.ValidString(v) {
				return rawValues(h)
			}
		}
	}
	return h
}

func rawValues(h http.Header) map[string][]value {
	raw := make(map[string][]value, len(h))
	for name, values := range h {
		raw[name] = nil
		for _, v := range values {
			raw[name] = append(raw[name], value(v))
		}
	}
	return raw
}

// value is a string of any bytes.
type value string

type base64Value struct {
	Base64 []byte `json:"base64"`
}

func (v value) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(v)) {
		return json.Marshal(string(v))
	}
	return json.Marshal(base64Value{[]byte(v)})
}

func (v *value) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] == '{' {
		var b base64Value
		err := json.Unmarshal(text, &b)
		*v = value(b.Base64)
		return err
	}
	return json.Unmarshal(text, (*string)(v))
}

// Most headers are lists of printable ASCII, which JSON holds unescaped. The functions below write and read them,
// because package encoding/json costs several times as much.

// encodePlain returns false for headers that it cannot write.
func encodePlain(h http.Header) (string, bool) {
	var few [8]string
	names := slices.AppendSeq(few[:0], maps.Keys(h))
	slices.Sort(names)
	size := 2
	for _, name := range names {
		size += len(name) + 6
		for _, v := range h[name] {
			size += len(v) + 3
		}
	}
	text := make([]byte, 0, size)
	for _, name := range names {
		values := h[name]
		if !plain(name) || len(values) == 0 {
			return "", false
		}
		text = append(append(append(text, `,"`...), name...), `":`...)
		start := len(text)
		for _, v := range values {
			if !plain(v) {
				return "", false
			}
			text = append(append(append(text, `,"`...), v...), '"')
		}
		text[start] = '['
		text = append(text, ']')
	}
	text[0] = '{'
	return string(append(text, '}')), true
}

// decodePlain returns false for text that encodePlain did not write.
func decodePlain(text string) (http.Header, bool) {
	h := http.Header{}
	for open := "{"; ; open = "," {
		name, rest, ok := cutString(text, open)
		if !ok {
			return nil, false
		}
		value, rest, ok := cutString(rest, ":[")
		if !ok {
			return nil, false
		}
		values := []string{value}
		for strings.HasPrefix(rest, ",") {
			if value, rest, ok = cutString(rest, ","); !ok {
				return nil, false
			}
			values = append(values, value)
		}
		h[name] = values
		if rest == "]}" {
			return h, true
		}
		if text, ok = strings.CutPrefix(rest, "]"); !ok {
			return nil, false
		}
	}
}

// cutString cuts before and then a plain quoted string off the start of text.
func cutString(text, before string) (value, rest string, ok bool) {
	text, ok = strings.CutPrefix(text, before)
	if !ok || text == "" || text[0] != '"' {
		return "", "", false
	}
	value, rest, ok = strings.Cut(text[1:], `"`)
	return value, rest, ok && plain(value)
}

// plain reports whether JSON holds s unescaped.
func plain(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ', c > '~', c == '"', c == '\\', c == '<', c == '>', c == '&':
			return false
		}
	}
	return true
}

// deniedHeaders are never stored and never replayed, even if a user allows them.
var deniedHeaders = map[string]bool{
	"Age": true, "Alt-Svc": true, "Authorization": true, "Connection": true,
	"Content-Length": true, "Date": true, "Idempotency-Key": true,
	"Idempotency-Replayed": true, "Idempotency-Bypassed": true,
	"Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Proxy-Connection": true, "Retry-After": true, "Server": true, "Set-Cookie": true,
	"Set-Cookie2": true, "Te": true, "Trailer": true, "Traceparent": true, "Tracestate": true,
	"Transfer-Encoding": true, "Upgrade": true, "Via": true, "Www-Authenticate": true,
}

// deniedPrefixes extend deniedHeaders to whole families.
var deniedPrefixes = []string{"Access-Control-", "Ratelimit", "X-Ratelimit", http.TrailerPrefix}

// Denied reports whether a header must never be replayed.
func Denied(name string) bool {
	name = http.CanonicalHeaderKey(name)
	if deniedHeaders[name] {
		return true
	}
	for _, p := range deniedPrefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

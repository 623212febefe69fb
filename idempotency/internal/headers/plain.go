package headers

import (
	"maps"
	"net/http"
	"slices"
	"strings"
)

// Most headers are lists of printable ASCII, which JSON holds as it is. These
// are written and read here, as package encoding/json would at several times
// the cost.

// encodePlain returns false for what it does not write.
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

// decodePlain returns false for what is not as encodePlain writes it.
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

// cutString takes a plain string in quotes off text, after what comes before it.
func cutString(text, before string) (value, rest string, ok bool) {
	text, ok = strings.CutPrefix(text, before)
	if !ok || text == "" || text[0] != '"' {
		return "", "", false
	}
	value, rest, ok = strings.Cut(text[1:], `"`)
	return value, rest, ok && plain(value)
}

// plain reports whether JSON holds s as it is.
func plain(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ', c > '~', c == '"', c == '\\', c == '<', c == '>', c == '&':
			return false
		}
	}
	return true
}

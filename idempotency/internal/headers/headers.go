// Package headers is how stores write the headers of a response: as a JSON
// object of lists of strings.
package headers

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"
)

// Encode returns h as JSON. A value that is not UTF-8, which HTTP allows and
// JSON cannot hold, is written as {"base64": …}.
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

// Decode reads what Encode wrote.
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
		h[name] = nil // a name without a value is one, too
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

// value is any bytes.
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

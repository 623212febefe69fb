package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxBodyBytes bounds a body. Where keys are kept their middleware reads it first, for the fingerprint, and holds to it.
const maxBodyBytes = 1 << 20

// members are the members of a JSON object, by name.
type members map[string]json.RawMessage

// readBody reads the JSON object of a request; no body is an object without members.
// It is stricter than encoding/json: names match by case, and none comes twice.
func readBody(r *http.Request, allowed ...string) (members, error) {
	data, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBodyBytes))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, problemError{newProblem(http.StatusRequestEntityTooLarge, codeTooLarge, "the body is above the limit")}
	}
	if err != nil {
		return nil, invalid("the body could not be read")
	}
	if len(data) == 0 {
		return nil, nil
	}
	if err := checkMediaType(r.Header); err != nil {
		return nil, err
	}
	if !utf8.Valid(data) {
		return nil, invalid("the body is not UTF-8")
	}
	return parseMembers(data, allowed)
}

func checkMediaType(h http.Header) error {
	// A type that is there twice becomes a list, which is none.
	media, params, err := mime.ParseMediaType(strings.Join(h.Values("Content-Type"), ", "))
	charset := params["charset"]
	plain := h.Get("Content-Encoding") == "" && (charset == "" || strings.EqualFold(charset, "utf-8"))
	if err != nil || media != "application/json" || !plain {
		return problemError{newProblem(http.StatusUnsupportedMediaType, codeMediaType, "the body must be application/json")}
	}
	return nil
}

func parseMembers(data []byte, allowed []string) (members, error) {
	// Valid also bounds the nesting, which the decoder's tokens do not.
	if !json.Valid(data) {
		return nil, invalid("the body is not one JSON value")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return nil, invalid("the body is not a JSON object")
	}
	found := members{}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return nil, invalid("the body is not JSON")
		}
		name, _ := token.(string)
		if !slices.Contains(allowed, name) {
			return nil, invalid(fmt.Sprintf("unknown member %.40q", name))
		}
		if _, twice := found[name]; twice {
			return nil, invalid(fmt.Sprintf("member %q comes twice", name))
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, invalid("the body is not JSON")
		}
		found[name] = value
	}
	return found, nil
}

// into decodes a member if it is there; null is not a value.
func (m members) into(name string, target any) error {
	value, ok := m[name]
	if !ok {
		return nil
	}
	if string(value) == "null" || json.Unmarshal(value, target) != nil {
		return invalid("member " + name + " has the wrong type")
	}
	return nil
}

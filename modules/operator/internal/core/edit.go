package core

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"

	jsonpatch "github.com/evanphx/json-patch/v5"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// MaxEdit bounds a body or a patch that is typed or read.
const MaxEdit = 1 << 20

// Edit replaces the bodies of messages that are sent again. The zero value leaves them as they are.
type Edit struct {
	Body  []byte // of the one message that is chosen; nil: not this
	Patch string // a JSON merge patch of each: https://www.rfc-editor.org/rfc/rfc7396
}

// None reports whether the bodies stay as they are.
func (e Edit) None() bool { return e.Body == nil && e.Patch == "" }

// Validate refuses a body beside a patch, one that is too large, and a patch that is no JSON object.
func (e Edit) Validate() error {
	var object map[string]json.RawMessage
	switch {
	case e.Body != nil && e.Patch != "":
		return errors.New("a body and a patch exclude each other")
	case max(len(e.Body), len(e.Patch)) > MaxEdit:
		return fmt.Errorf("a body or a patch has at most %d bytes", MaxEdit)
	case e.Patch != "" && (json.Unmarshal([]byte(e.Patch), &object) != nil || object == nil):
		return errors.New("a patch is a JSON object: what it names is replaced, what is null in it removed (RFC 7396)")
	}
	return nil
}

// apply is the body that a message gets.
func (e Edit) apply(body []byte) ([]byte, error) {
	if e.Body != nil {
		return e.Body, nil
	}
	if !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) {
		return nil, errors.New("the body is no JSON object")
	}
	return jsonpatch.MergePatch(body, []byte(e.Patch))
}

// Function is for one change, and asks may for each message first. It is nil where nothing is edited.
func (e Edit) Function(may func(operator.MaskedMessage) error) func(operator.MaskedMessage) ([]byte, error) {
	if e.None() {
		return nil
	}
	given := map[string]bool{} // the places of which a message got the body
	return func(m operator.MaskedMessage) ([]byte, error) {
		if e.Body != nil && given[m.From] {
			return nil, errors.New("another message with the same id got the body, which is for one alone")
		}
		if may != nil {
			if err := may(m); err != nil {
				return nil, err
			}
		}
		given[m.From] = true
		return e.apply(m.Body)
	}
}

// Masking is a mask that hides a body where it panics. It also runs where nobody else would catch that, and the service
// would end.
func Masking(mask func(operator.MaskedMessage) []byte) func(operator.MaskedMessage) []byte {
	if mask == nil {
		return nil
	}
	return func(m operator.MaskedMessage) (shown []byte) {
		defer func() {
			if failure := recover(); failure != nil {
				slog.Error("operator: the mask panics", slog.String("from", m.From), slog.Any("panic", failure), slog.String("stack", string(debug.Stack())))
				shown = nil
			}
		}()
		return mask(m)
	}
}

// MayEdit refuses a message of which a mask hides something. It is nil where there is none.
func MayEdit(mask func(operator.MaskedMessage) []byte) func(operator.MaskedMessage) error {
	if mask == nil {
		return nil
	}
	return func(m operator.MaskedMessage) error {
		shown := m
		shown.Body = slices.Clone(m.Body)
		if !bytes.Equal(mask(shown), m.Body) {
			return errors.New("the service hides a part of the body")
		}
		return nil
	}
}

package inbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"
)

// MaxBodyBytes is the largest body that Decode reads, RabbitMQ's own bound since 4.0.
const MaxBodyBytes = 16 << 20

// Decode reads the JSON body of a message. It refuses a content type other than JSON, a
// body over MaxBodyBytes, anything but exactly one JSON value, and null; members that T
// does not know are passed over, so that senders may add some. Errors are of class ClassValidation.
func Decode[T any](m *Message) (T, error) {
	var v T
	if err := decode(m, &v); err != nil {
		var zero T
		return zero, Invalid(fmt.Errorf("inbox: decode %T: %w", v, err))
	}
	return v, nil
}

func decode(m *Message, v any) error {
	if !isJSON(m.ContentType) {
		return errors.New("content type is not JSON")
	}
	if len(m.Body) > MaxBodyBytes {
		return fmt.Errorf("body has %d bytes, more than %d", len(m.Body), MaxBodyBytes)
	}
	if bytes.Equal(bytes.TrimSpace(m.Body), []byte("null")) {
		return errors.New("body is null")
	}
	if err := json.Unmarshal(m.Body, v); err != nil {
		return &decodeError{err}
	}
	return nil
}

// decodeError says where a body is wrong without quoting from it, as the texts of some
// causes do: those of time.Time and of other types with their own decoding.
type decodeError struct{ err error }

func (e *decodeError) Unwrap() error { return e.err }

func (e *decodeError) Error() string {
	if syntax, ok := errors.AsType[*json.SyntaxError](e.err); ok {
		return fmt.Sprintf("malformed JSON at byte %d", syntax.Offset)
	}
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](e.err); ok {
		return fmt.Sprintf("member %q at byte %d does not fit %v", mismatch.Field, mismatch.Offset, mismatch.Type)
	}
	return "a value is refused by its type"
}

// isJSON accepts application/json and every +json type; no type at all counts as JSON.
func isJSON(contentType string) bool {
	if contentType == "" || contentType == "application/json" {
		return true
	}
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/json" || strings.HasSuffix(media, "+json"))
}

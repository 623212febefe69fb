package base

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"strings"
)

// byteOrderMark is what some editors and clients of .NET put before a JSON text.
var byteOrderMark = []byte("\xef\xbb\xbf")

// Decode reads a JSON body into v, a pointer; driver.Decode has the rules.
func Decode(contentType, contentEncoding string, body []byte, v any) error {
	if !isJSON(contentType) {
		return errors.New("content type is not JSON")
	}
	if len(body) > MaxBodyBytes {
		return fmt.Errorf("body has %d bytes, more than %d", len(body), MaxBodyBytes)
	}
	body, err := unpacked(contentEncoding, body)
	if err != nil {
		return err
	}
	body = bytes.TrimPrefix(body, byteOrderMark)
	if bytes.Equal(bytes.TrimSpace(body), []byte("null")) {
		return errors.New("body is null")
	}
	if err := json.Unmarshal(body, v); err != nil {
		return &decodeError{err}
	}
	return nil
}

// unpacked returns a body as it was before gzip, at most MaxBodyBytes of it. Other content encodings are left alone:
// some clients name a character set there.
func unpacked(contentEncoding string, body []byte) ([]byte, error) {
	if !strings.EqualFold(contentEncoding, "gzip") {
		return body, nil
	}
	packed, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("content encoding gzip: %w", err)
	}
	body, err = io.ReadAll(io.LimitReader(packed, MaxBodyBytes+1))
	if err != nil {
		return nil, fmt.Errorf("content encoding gzip: %w", err)
	}
	if len(body) > MaxBodyBytes {
		return nil, fmt.Errorf("body has more than %d bytes when unpacked", MaxBodyBytes)
	}
	return body, nil
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

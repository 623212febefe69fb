// Package base is shared by package inbox and package inbox/driver: the markers of errors, classes, limits,
// and the message of a context.
package base

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"reflect"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"
)

// The limits of a message.
const (
	MaxNameBytes = 255
	MaxBodyBytes = 16 << 20
)

// ClassValidation is the class of messages that no handler can get.
const ClassValidation = "validation"

const maxClassBytes = 64

// ValidClass reports whether a text can be a class: 1 to 64 of a-z, 0-9, dot, hyphen, underscore.
func ValidClass(class string) bool {
	if class == "" || len(class) > maxClassBytes {
		return false
	}
	return strings.IndexFunc(class, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '.' && r != '-' && r != '_'
	}) < 0
}

// IsText reports whether a database can keep s as text.
func IsText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// Panic is the result of a message whose handler panicked. If the panic's value is an error, Panic has the
// class of that error.
type Panic struct {
	Value any
	Stack []byte // for the log; not in Error's text
}

// Error implements error.
func (e *Panic) Error() string { return fmt.Sprintf("inbox: handler panicked: %v", e.Value) }

// Unwrap returns the panic's value if it is an error.
func (e *Panic) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Safely returns the panic of fn as a Panic.
func Safely(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}

type messageKey struct{}

// NewContext returns a context with the message, a *inbox.Message.
func NewContext(ctx context.Context, m any) context.Context {
	return context.WithValue(ctx, messageKey{}, m)
}

// FromContext returns the message set by NewContext, or nil.
func FromContext(ctx context.Context) any { return ctx.Value(messageKey{}) }

type handlerTimeoutKey struct{}

// WithHandlerTimeout returns the context of a batch. Its deadline applies to all messages together, and d is
// the time limit of each message.
func WithHandlerTimeout(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, handlerTimeoutKey{}, d)
}

// HandlerTimeout returns the value of WithHandlerTimeout, or 0: the deadline is for one message.
func HandlerTimeout(ctx context.Context) time.Duration {
	d, _ := ctx.Value(handlerTimeoutKey{}).(time.Duration)
	return d
}

// byteOrderMark is written before a JSON text by some editors and .NET clients.
var byteOrderMark = []byte("\xef\xbb\xbf")

// Into returns a value of type T that decode has filled. decode gets a pointer to it or, if T is a pointer, a T that points
// to a new value.
func Into[T any](decode func(v any) error) (T, error) {
	var v, none T
	target := any(&v)
	if typ := reflect.TypeFor[T](); typ.Kind() == reflect.Pointer {
		v = reflect.New(typ.Elem()).Convert(typ).Interface().(T)
		target = v
	}
	if err := decode(target); err != nil {
		return none, err
	}
	return v, nil
}

// Decode reads a JSON body into v, a pointer; inbox.DecodeJSON has the rules.
func Decode(contentType, contentEncoding string, body []byte, v any) error {
	if !isJSON(contentType) {
		return errors.New("content type is not JSON")
	}
	body, err := Unpacked(contentEncoding, body)
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

// IsPacked reports whether Unpacked changes a body.
func IsPacked(contentEncoding string) bool { return strings.EqualFold(contentEncoding, "gzip") }

// Unpacked returns a body without content encoding gzip. It rejects a body over MaxBodyBytes, packed or unpacked. Other
// content encodings are left alone: some clients name a character set there.
func Unpacked(contentEncoding string, body []byte) ([]byte, error) {
	if len(body) > MaxBodyBytes {
		return nil, fmt.Errorf("body has %d bytes, more than %d", len(body), MaxBodyBytes)
	}
	if !IsPacked(contentEncoding) {
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

// decodeError describes where a body is wrong without quoting it. The texts of some causes quote it, such as
// errors of time.Time and of other types with their own decoding.
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

// Kind is the kind of a marker.
type Kind int

// The kinds. Of joined errors, the highest kind after Unrecoverable decides.
const (
	Unmarked Kind = iota
	Unrecoverable
	Recoverable
	Postponed
	Unavailable
)

// ErrUnavailable is inside every error that is marked Unavailable.
var ErrUnavailable = Mark(errors.New("inbox: unavailable"), Verdict{Kind: Unavailable})

// Verdict is the combined meaning of an error's markers.
type Verdict struct {
	Kind  Kind
	Class string        // "": the class of the inner error
	After time.Duration // 0: the delay of the policy
}

// marked adds a verdict to an error without changing its text.
type marked struct {
	err     error
	verdict Verdict
}

func (e *marked) Error() string { return e.err.Error() }
func (e *marked) Unwrap() error { return e.err }

// Is makes errors.Is(err, ErrUnavailable) true.
func (e *marked) Is(target error) bool {
	return target == ErrUnavailable && e.verdict.Kind == Unavailable
}

// Mark adds a verdict to an error. Nil stays nil.
func Mark(err error, v Verdict) error {
	if err == nil {
		return nil
	}
	return &marked{err, v}
}

// Judge reads the markers of an error; driver.Classify has the rules.
func Judge(err error) Verdict {
	switch e := err.(type) {
	case *marked:
		return e.over(Judge(e.err))
	case interface{ Unwrap() []error }:
		return judgeAll(e.Unwrap())
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return Judge(inner)
		}
	}
	return Verdict{}
}

// over returns the marker's verdict, completed by the verdict of the error inside it.
func (e *marked) over(inner Verdict) Verdict {
	v := inner
	if e.verdict.Kind != Unmarked {
		v.Kind, v.After = e.verdict.Kind, e.verdict.After
	}
	if e.verdict.Class != "" {
		v.Class = e.verdict.Class
	}
	return v
}

func judgeAll(errs []error) Verdict {
	var verdicts []Verdict
	decides := Unmarked
	for _, err := range errs {
		if err == nil {
			continue
		}
		v := Judge(err)
		verdicts = append(verdicts, v)
		if v.Kind > Unrecoverable {
			decides = max(decides, v.Kind)
		}
	}
	if decides == Unmarked && allUnrecoverable(verdicts) {
		decides = Unrecoverable
	}
	joined := Verdict{Kind: decides}
	for _, v := range verdicts {
		if v.Kind != decides {
			continue
		}
		joined.After = max(joined.After, v.After)
		if joined.Class == "" {
			joined.Class = v.Class
		}
	}
	return joined
}

func allUnrecoverable(verdicts []Verdict) bool {
	for _, v := range verdicts {
		if v.Kind != Unrecoverable {
			return false
		}
	}
	return len(verdicts) > 0
}

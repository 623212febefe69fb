package base

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// The limits of a message.
const (
	MaxNameBytes = 255
	MaxBodyBytes = 16 << 20
)

// ClassValidation is the class of messages that no handler can be given.
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

// Panic is the result of a message whose handler panicked. It has no class of its own, but that
// of the value where that is an error.
type Panic struct {
	Value any
	Stack []byte // for the log; not in Error's text
}

// Error implements error.
func (e *Panic) Error() string { return fmt.Sprintf("inbox: handler panicked: %v", e.Value) }

// Unwrap returns the panic's value when that is an error.
func (e *Panic) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

type messageKey struct{}

// NewContext returns a context that carries the message in hand, a *inbox.Message.
func NewContext(ctx context.Context, m any) context.Context {
	return context.WithValue(ctx, messageKey{}, m)
}

// FromContext returns the message that NewContext put there, or nil.
func FromContext(ctx context.Context) any { return ctx.Value(messageKey{}) }

type handlerTimeoutKey struct{}

// WithHandlerTimeout returns the context of a batch, whose deadline is that of all its messages
// together, with how long the work on one of them may take.
func WithHandlerTimeout(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, handlerTimeoutKey{}, d)
}

// HandlerTimeout returns what WithHandlerTimeout put there, or 0: the deadline is that of one message.
func HandlerTimeout(ctx context.Context) time.Duration {
	d, _ := ctx.Value(handlerTimeoutKey{}).(time.Duration)
	return d
}

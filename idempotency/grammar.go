package idempotency

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// grammarError is ErrKeyInvalid with the form that a key must have.
type grammarError struct {
	*coded
	form string
}

func (e *grammarError) Is(target error) bool { return target == ErrKeyInvalid }

// The refusals of the functions Parse….
var (
	errNotStrict = notOfForm("a UUID v4 in lowercase and without hyphens, such as a0eebc999c0b4ef8bb6d6bb9bd380a11")
	errNotUUID   = notOfForm("a UUID, such as a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
	errNotOpaque = notOfForm("1 to 255 visible ASCII characters, in quotes or without")
)

func notOfForm(form string) error {
	return &grammarError{form: form, coded: &problem.Error{
		Text: "idempotency: key is not " + form,
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be there once: " + form + ".",
		},
	}}
}

// keyReader takes the key from the values of a header.
type keyReader struct {
	parse    func(header string) (Key, error)
	required error // refuses none
	several  error // refuses more than one: two readers might take two different keys from them
}

func newKeyReader(parse func(string) (Key, error)) keyReader {
	r := keyReader{parse: parse, several: ErrKeyInvalid}
	if _, err := parse(""); err != nil { // says what form a key has
		r.several = invalid(err)
	}
	ask := "This request needs the header Idempotency-Key"
	if known, ok := errors.AsType[*grammarError](r.several); ok {
		ask += ": " + known.form
	}
	r.required = &problem.Error{
		Text:    "idempotency: no key",
		Problem: problem.Problem{Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_REQUIRED", Detail: ask + "."},
	}
	return r
}

func (r keyReader) read(values []string) (Key, error) {
	switch len(values) {
	case 0:
		return "", r.required
	case 1:
	default:
		return "", r.several
	}
	key, err := r.parse(values[0])
	if err == nil {
		err = key.Validate()
	}
	if err != nil {
		return "", invalid(err)
	}
	return key, nil
}

// invalid has whatever a function of the user says of a key be a refusal of it.
func invalid(err error) error {
	if _, known := problem.Of(err); known {
		return err
	}
	return fmt.Errorf("%w: %w", ErrKeyInvalid, err)
}

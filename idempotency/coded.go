package idempotency

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// Errors gives domain errors the codes under which Do keeps them, such as
// "CARD_DECLINED". A code is stored: it must mean the same for ever.
type Errors map[string]error

// WithErrors returns store with domain errors: when Do is called with it, an
// error of fn that is one of errs (by errors.Is) is a result like any other. It
// is kept, and a repeated call returns the one with its code, with replayed
// true. A kept code that errs does not know is ErrResultUnavailable.
func WithErrors(store Store, errs Errors) (Store, error) {
	var wrong []error
	if store == nil {
		wrong = append(wrong, errors.New("idempotency: store is nil"))
	}
	for code, err := range errs {
		if code == "" || err == nil {
			wrong = append(wrong, fmt.Errorf("idempotency: Errors[%q]: a code and an error are needed", code))
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return &codedStore{Store: store, errs: maps.Clone(errs)}, nil
}

type codedStore struct {
	Store
	errs Errors
}

// A kept error is a response with this status and the code in this header.
const (
	errorHeader = "Idempotency-Error"
	errorStatus = http.StatusUnprocessableEntity
)

// keptError is what is stored of err; nil: nothing.
func keptError(store Store, err error) *Response {
	coded, ok := store.(*codedStore)
	if !ok {
		return nil
	}
	for _, code := range slices.Sorted(maps.Keys(coded.errs)) { // an error that is two of them has one code
		if errors.Is(err, coded.errs[code]) {
			return &Response{Status: errorStatus, Header: http.Header{errorHeader: {code}}}
		}
	}
	return nil
}

// replayError is the error that was kept in place of a response; nil: none was.
func replayError(store Store, resp Response) error {
	code := resp.Header.Get(errorHeader)
	if code == "" {
		return nil
	}
	if coded, ok := store.(*codedStore); ok && coded.errs[code] != nil {
		return coded.errs[code]
	}
	return fmt.Errorf("%w: it was the error %q, which has no meaning here", ErrResultUnavailable, code)
}

package booking

import "errors"

// Code says why a wish was refused; clients see it as it is.
type Code string

// The refusals of the domain.
const (
	CodeInvalidRequest     Code = "INVALID_REQUEST"
	CodeNotFound           Code = "NOT_FOUND"
	CodeNotYours           Code = "NOT_YOUR_RESERVATION"
	CodeSeatsUnavailable   Code = "SEATS_UNAVAILABLE"
	CodeReservationNotHeld Code = "RESERVATION_NOT_HELD"
	CodeReservationExpired Code = "RESERVATION_EXPIRED"
)

// Error is a refusal: an answer to the client, not a fault of the shop.
// A use case that returns one has changed nothing.
type Error struct {
	Code   Code
	Detail string
}

// Error gives the code and the detail.
func (e *Error) Error() string { return "booking: " + string(e.Code) + ": " + e.Detail }

// CodeOf finds the refusal in an error; false when the error is a fault.
func CodeOf(err error) (Code, bool) {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code, true
	}
	return "", false
}

// NotFound is the refusal for an id that names nothing.
func NotFound(what string) error { return &Error{CodeNotFound, "no such " + what} }

func invalid(detail string) error { return &Error{CodeInvalidRequest, detail} }

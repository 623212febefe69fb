package driver

import (
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// Decode reads the JSON body of a message. It unpacks content encoding gzip and skips a byte order mark. It refuses a content type other than JSON, a
// body over MaxBodyBytes packed or unpacked, anything but exactly one JSON value, and null; members that T
// does not know are passed over, so that senders may add some. Errors are of class ClassValidation.
func Decode[T any](m *inbox.Message) (T, error) {
	var v T
	if err := base.Decode(m.ContentType, m.ContentEncoding, m.Body, &v); err != nil {
		var zero T
		return zero, inbox.Invalid(fmt.Errorf("inbox: decode %T: %w", v, err))
	}
	return v, nil
}

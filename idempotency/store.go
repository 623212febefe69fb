package idempotency

import "github.com/holdfast-go/holdfast/idempotency/driver"

// refusal says why the work behind the answer of a store is not there for a
// request with fingerprint fp; nil when it is to be done, or was done.
func refusal(out driver.BeginResult, fp driver.Fingerprint) error {
	switch {
	case out.State == driver.Acquired:
		return nil
	case fp.Conflicts(out.Fingerprint):
		return ErrKeyReused
	case out.State == driver.InProgress:
		return &inUseError{keyInUse, out.Lease}
	case out.Response.Unavailable():
		return ErrResultUnavailable
	}
	return nil
}

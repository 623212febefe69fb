package idempotencytest

import pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"

// NewRecords returns the records of New.
func NewRecords() pgxdriver.Records { return newRecords() }

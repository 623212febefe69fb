package idempotency

import "github.com/holdfast-go/holdfast/internal/check"

// Finding is what the Check of a store reports: something missing or mis-set on
// the server, and how to mend it.
type Finding = check.Finding

package ratelimit

import "github.com/holdfast-go/holdfast/internal/check"

// Finding is what the adapters' Check methods return: something that is missing
// or mis-set on the server, and how to mend it.
type Finding = check.Finding

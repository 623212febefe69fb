package inbox

import "github.com/holdfast-go/holdfast/internal/check"

// Finding is one thing that an adapter's Check found missing or mis-set on its server.
type Finding = check.Finding

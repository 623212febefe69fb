package outbox

import "github.com/holdfast-go/holdfast/outbox/driver"

// Transports maps the name in Message.Transport to the Publisher that sends it.
// The name "" is the default one.
type Transports map[string]driver.Publisher

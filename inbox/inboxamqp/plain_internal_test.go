package inboxamqp

import "github.com/holdfast-go/holdfast/internal/wire"

// plain reads what any Symfony application may send.
var plain wire.Symfony

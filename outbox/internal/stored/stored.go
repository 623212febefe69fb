// Package stored turns a stored message back into the one that was written.
package stored

import (
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Message returns m as its writer knew it. It shares the body and the maps of m.
func Message(m driver.Message) outbox.Message {
	return outbox.Message{
		ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, Key: m.Key,
		Transport: m.Transport, NotBefore: m.NotBefore,
		Route: outbox.Route{Exchange: m.Exchange, RoutingKey: m.RoutingKey, Headers: m.RouteHeaders},
	}
}

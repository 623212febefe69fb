// Package stored converts stored messages back into written messages.
package stored

import (
	"maps"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Message returns m as it was written. It shares the body and the maps of m.
func Message(m driver.Message) outbox.Message {
	return outbox.Message{
		ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, Key: m.Key,
		Transport: m.Transport, NotBefore: m.NotBefore,
		Route: outbox.Route{Exchange: m.Exchange, RoutingKey: m.RoutingKey, Headers: m.RouteHeaders},
	}
}

// Rules choose the destination of a message. For each field of the route, the first non-empty source wins:
//
//  1. ByName[message name]
//  2. the result of Router; without a Router, the message's own route
//  3. Exchange below, and the message's name as routing key
//
// Headers of the first two are merged; the earlier rule wins.
type Rules struct {
	ByName   map[string]outbox.Route
	Router   func(outbox.Message) outbox.Route
	Exchange string
}

// Route returns the route of m. Its headers are read-only.
func (r Rules) Route(m driver.Message) outbox.Route {
	own := outbox.Route{Exchange: m.Exchange, RoutingKey: m.RoutingKey, Headers: m.RouteHeaders}
	if r.Router != nil {
		own = r.Router(Message(m))
	}
	convention := outbox.Route{Exchange: r.Exchange, RoutingKey: m.Name}
	return overlay(overlay(convention, own), r.ByName[m.Name])
}

// overlay returns route, with the non-empty fields of by replacing its own.
func overlay(route, by outbox.Route) outbox.Route {
	if by.Exchange != "" {
		route.Exchange = by.Exchange
	}
	if by.RoutingKey != "" {
		route.RoutingKey = by.RoutingKey
	}
	if len(by.Headers) == 0 {
		return route
	}
	merged := make(map[string]string, len(route.Headers)+len(by.Headers))
	maps.Copy(merged, route.Headers)
	maps.Copy(merged, by.Headers)
	route.Headers = merged
	return route
}

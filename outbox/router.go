package outbox

import "maps"

// Router chooses where a message goes. It is a pure function of the message and safe for concurrent
// use.
type Router interface {
	Route(m Message) Route
}

// Routes is the standard Router. For each field of the route the first of these that is not empty
// decides:
//
//  1. ByName[message name]
//  2. Message.Route, as set by the caller, or by the type's registration where the caller set nothing
//  3. the convention: Exchange below, and the message's name as routing key
//
// Headers of all three are merged; the earlier rule wins. The zero Routes is the plain convention.
type Routes struct {
	// Exchange is where messages go that nothing else sends elsewhere. Empty means the
	// transport's own default.
	Exchange string
	// ByName overrides by message name.
	ByName map[string]Route
}

// Route meets Router.
func (r Routes) Route(m Message) Route {
	route := Route{Exchange: r.Exchange, RoutingKey: m.Name}
	return route.overlay(m.Route).overlay(r.ByName[m.Name])
}

// overlay returns r with the fields of by that are not empty.
func (r Route) overlay(by Route) Route {
	if by.Exchange != "" {
		r.Exchange = by.Exchange
	}
	if by.RoutingKey != "" {
		r.RoutingKey = by.RoutingKey
	}
	if len(by.Headers) == 0 {
		return r
	}
	merged := make(map[string]string, len(r.Headers)+len(by.Headers))
	maps.Copy(merged, r.Headers)
	maps.Copy(merged, by.Headers)
	r.Headers = merged
	return r
}

package outbox

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"sync"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Types knows which message name and route belong to a Go type, so that code
// that emits an event names neither. The zero Types is empty and ready. It is safe for concurrent
// use, and must not be copied.
type Types struct {
	mu    sync.RWMutex
	known map[reflect.Type]registration
}

type registration struct {
	name  string
	route Route
}

// Register gives the values of type T a name and a route; the zero Route leaves the
// route to the convention. A type can be registered once; several types may share a name.
func Register[T any](t *Types, name string, route Route) error {
	typ := reflect.TypeFor[T]()
	if typ.Kind() == reflect.Interface {
		return fmt.Errorf("outbox: register %v: an interface has no values of its own", typ)
	}
	if err := driver.CheckName(name); err != nil {
		return fmt.Errorf("outbox: register %v: name %w", typ, err)
	}
	var errs []error
	report := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("outbox: register %v: %s %s", typ, field, fmt.Sprintf(format, args...)))
	}
	checkText("Route.Exchange", route.Exchange, maxExchange, report)
	checkText("Route.RoutingKey", route.RoutingKey, maxRoutingKey, report)
	checkHeaders("Route.Headers", route.Headers, report)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.known[typ]; ok {
		return fmt.Errorf("outbox: register %v: it is registered as %q already", typ, old.name)
	}
	if t.known == nil {
		t.known = map[reflect.Type]registration{}
	}
	t.known[typ] = registration{name, route}
	return nil
}

// NewMessage makes a message from v, whose type must be registered, exactly as
// registered: a *T is not a T. Its Route is the registered one; set fields of it to override.
func (t *Types) NewMessage(v any) (Message, error) {
	t.mu.RLock()
	r, ok := t.known[reflect.TypeOf(v)]
	t.mu.RUnlock()
	if !ok {
		return Message{}, fmt.Errorf("outbox: type %T is not registered", v)
	}
	m, err := NewMessage(r.name, v)
	m.Route = r.route
	m.Route.Headers = maps.Clone(r.route.Headers)
	return m, err
}

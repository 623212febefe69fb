package outbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Message is one message on its way from a business transaction to a broker.
// Body and Headers are not copied: leave them alone once the message is written.
type Message struct {
	// ID is a UUID v7. The zero UUID lets the writer make one.
	ID uuid.UUID
	// Name says what happened, such as "order.placed": lower-case words of letters, digits,
	// "_" and "-", joined by dots, at most 128 bytes. Brokers carry it as the message type.
	Name string
	// Body holds business data only. It must be valid JSON unless ContentType says something else.
	Body []byte
	// ContentType is a media type. Default: application/json.
	ContentType string
	// Headers travel beside the body. The trace context of the writing context is added to them.
	Headers map[string]string
	// Key is the ordering key: messages with the same key are published in the order in which
	// they were stored. Empty means no order. At most 255 bytes of UTF-8.
	Key string
	// Transport names the relay's publisher for this message. Empty means the default one.
	Transport string
	// Route is where the message goes, unless the Config of its publisher says something else.
	// Optional.
	Route Route
	// NotBefore is the earliest time to publish, by the store's clock. Zero, and a time in the past,
	// mean at once. Later messages of the same Key wait with it, earlier ones do not. A relay that
	// takes the message no longer sees it.
	NotBefore time.Time
}

// Route is where a message goes on a broker that routes. Empty fields leave the choice to the
// publisher: its Config says how.
type Route struct {
	// Exchange is the exchange, or whatever the transport calls its destination; at most 127 bytes.
	Exchange string
	// RoutingKey is at most 255 bytes.
	RoutingKey string
	// Headers are added to the message's own and win over them.
	Headers map[string]string
}

// NewMessage makes a message with a fresh id and v encoded as JSON. Everything else
// is checked where the message is written.
func NewMessage(name string, v any) (Message, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Message{}, fmt.Errorf("outbox: encode %s: %w", name, err)
	}
	return Message{ID: ids.New(), Name: name, Body: body, ContentType: contentTypeJSON}, nil
}

// contentTypeJSON is the content type of a message that names none.
const contentTypeJSON = "application/json"

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

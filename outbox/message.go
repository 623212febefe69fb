package outbox

import (
	"cmp"
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

// Message is one message that a business transaction sends to a broker.
// Body and Headers are not copied: do not change them after writing the message.
type Message struct {
	// ID is a UUID v7. With the zero UUID, the writer generates one.
	ID uuid.UUID
	// Name is the kind of event or command, such as "order.placed": lower-case words of letters,
	// digits, "_" and "-", joined by dots, at most 128 bytes. Brokers carry it as the message type.
	Name string
	// Body holds business data only. It must be valid JSON unless ContentType names another type.
	Body []byte
	// ContentType is a media type. Default: application/json.
	ContentType string
	// Headers are sent with the body. The writer adds the trace context of its ctx to them.
	Headers map[string]string
	// Key is the ordering key: messages with the same key are published in the order in which
	// they were stored. Empty means no order. At most 255 bytes of UTF-8.
	Key string
	// Transport names the relay's publisher for this message. Empty means the default publisher.
	Transport string
	// Route is the destination of the message. The publisher's Config can override it. Optional.
	Route Route
	// NotBefore is the earliest time to publish, by the store's clock. Zero, or a time in the past,
	// means immediately. Later messages of the same Key wait for it too; earlier ones do not.
	// Publishers cannot read it.
	NotBefore time.Time
}

// Route is a destination on a broker that routes messages. For an empty field, the publisher
// chooses according to its Config.
type Route struct {
	// Exchange is the transport's name for a destination, such as an exchange; at most 127 bytes.
	Exchange string
	// RoutingKey is at most 255 bytes.
	RoutingKey string
	// Headers are merged into the message's headers and override them.
	Headers map[string]string
}

// NewMessage returns a message with a new id and v encoded as JSON. It returns an error if v
// cannot be encoded. The writer checks everything else.
func NewMessage(name string, v any) (Message, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Message{}, fmt.Errorf("outbox: encode %s: %w", name, err)
	}
	return Message{ID: ids.New(), Name: name, Body: body, ContentType: contentTypeJSON}, nil
}

// contentTypeJSON is the default content type of a message.
const contentTypeJSON = "application/json"

// Types maps Go types to message names and routes, so that the code that emits an event does not
// repeat them. The zero Types is empty and ready to use. It is safe for concurrent use, and must not be copied.
type Types struct {
	// Encode returns the body and the content type of a value, for formats such as protobuf. It is set before the
	// first NewMessage, and several goroutines call it. An empty content type means JSON. Default: json.Marshal.
	Encode func(v any) (body []byte, contentType string, err error)

	mu    sync.RWMutex
	known map[reflect.Type]registration
}

type registration struct {
	name  string
	route Route
}

// Register maps type T to a message name and a route. With the zero Route, the publisher chooses
// the route. Each type can be registered once; several types may share a name. It returns an error
// if T is an interface or registered already, or if the name or the route is invalid.
func Register[T any](t *Types, name string, route Route) error {
	typ := reflect.TypeFor[T]()
	if typ.Kind() == reflect.Interface {
		return fmt.Errorf("outbox: register %v: interface types cannot be registered", typ)
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
		return fmt.Errorf("outbox: register %v: already registered as %q", typ, old.name)
	}
	if t.known == nil {
		t.known = map[reflect.Type]registration{}
	}
	t.known[typ] = registration{name, route}
	return nil
}

// NewMessage returns a message with v encoded by Encode, and the name and route of v's type. It returns an
// error if exactly that type is not registered: *T and T are different types. You may change the
// message's Route afterwards.
func (t *Types) NewMessage(v any) (Message, error) {
	t.mu.RLock()
	r, ok := t.known[reflect.TypeOf(v)]
	t.mu.RUnlock()
	if !ok {
		return Message{}, fmt.Errorf("outbox: type %T is not registered", v)
	}
	m, err := t.encode(r.name, v)
	m.Route = r.route
	m.Route.Headers = maps.Clone(r.route.Headers)
	return m, err
}

func (t *Types) encode(name string, v any) (Message, error) {
	if t.Encode == nil {
		return NewMessage(name, v)
	}
	body, contentType, err := t.Encode(v)
	if err != nil {
		return Message{}, fmt.Errorf("outbox: encode %s: %w", name, err)
	}
	return Message{ID: ids.New(), Name: name, Body: body, ContentType: cmp.Or(contentType, contentTypeJSON)}, nil
}

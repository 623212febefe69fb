package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

func TestPrepareRefuses(t *testing.T) {
	t.Parallel()
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint("h", i)] = "v"
	}
	for name, tc := range map[string]struct {
		change func(m *outbox.Message)
		field  string
	}{
		"id of version 4":       {func(m *outbox.Message) { m.ID = uuid.New() }, "ID"},
		"no name":               {func(m *outbox.Message) { m.Name = "" }, "Name"},
		"upper case":            {func(m *outbox.Message) { m.Name = "Order.placed" }, "Name"},
		"two dots":              {func(m *outbox.Message) { m.Name = "order..placed" }, "Name"},
		"last dot":              {func(m *outbox.Message) { m.Name = "order." }, "Name"},
		"wildcard":              {func(m *outbox.Message) { m.Name = "order.*" }, "Name"},
		"long name":             {func(m *outbox.Message) { m.Name = strings.Repeat("a", 129) }, "Name"},
		"no body":               {func(m *outbox.Message) { m.Body = nil }, "Body"},
		"cut JSON":              {func(m *outbox.Message) { m.Body = []byte(`{"a":`) }, "Body"},
		"JSON not UTF-8":        {func(m *outbox.Message) { m.Body = []byte("\"\xff\"") }, "Body"},
		"JSON of another kind":  {func(m *outbox.Message) { m.ContentType, m.Body = "application/x+json; charset=utf-8", []byte("x") }, "Body"},
		"large body":            {func(m *outbox.Message) { m.Body = []byte(`"` + strings.Repeat("a", 1<<20) + `"`) }, "Body"},
		"content type":          {func(m *outbox.Message) { m.ContentType = "not a type" }, "ContentType"},
		"content type, no type": {func(m *outbox.Message) { m.ContentType = "json" }, "ContentType"},
		"content type, long":    {func(m *outbox.Message) { m.ContentType = "text/" + strings.Repeat("a", 200) }, "ContentType"},
		"long key":              {func(m *outbox.Message) { m.Key = strings.Repeat("k", 256) }, "Key"},
		"key not UTF-8":         {func(m *outbox.Message) { m.Key = "\xff" }, "Key"},
		"key with NUL":          {func(m *outbox.Message) { m.Key = "\x00" }, "Key"},
		"key with C1 control":   {func(m *outbox.Message) { m.Key = "\u0085" }, "Key"},
		"transport":             {func(m *outbox.Message) { m.Transport = "ä" }, "Transport"},
		"exchange":              {func(m *outbox.Message) { m.Route.Exchange = strings.Repeat("x", 128) }, "Route.Exchange"},
		"routing key":           {func(m *outbox.Message) { m.Route.RoutingKey = "a\nb" }, "Route.RoutingKey"},
		"year":                  {func(m *outbox.Message) { m.NotBefore = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }, "NotBefore"},
		"route header":          {func(m *outbox.Message) { m.Route.Headers = map[string]string{"CC": "v"} }, "Route.Headers"},
		"many headers":          {func(m *outbox.Message) { m.Headers = many }, "Headers"},
		"header name":           {func(m *outbox.Message) { m.Headers = map[string]string{"a b": "v"} }, "Headers"},
		"empty header name":     {func(m *outbox.Message) { m.Headers = map[string]string{"": "v"} }, "Headers"},
		"header value":          {func(m *outbox.Message) { m.Headers = map[string]string{"a": "x\ny"} }, "Headers"},
		"large headers":         {func(m *outbox.Message) { m.Headers = map[string]string{"a": strings.Repeat("v", 17<<10)} }, "Headers"},
		"reserved type":         {func(m *outbox.Message) { m.Headers = map[string]string{"Type": "v"} }, "Headers"},
		"reserved death":        {func(m *outbox.Message) { m.Headers = map[string]string{"x-death": "v"} }, "Headers"},
		"reserved for holdfast": {func(m *outbox.Message) { m.Headers = map[string]string{"holdfast-attempt": "1"} }, "Headers"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := outbox.Message{Name: "order.placed", Body: []byte("1")}
			tc.change(&bad)
			got, err := outbox.Prepare(t.Context(), []outbox.Message{{Name: "good", Body: []byte("1")}, bad}, 0)
			var refused *outbox.MessageError
			if !errors.As(err, &refused) || refused.Index != 1 || refused.Field != tc.field || got != nil {
				t.Errorf("returned %v", err)
			}
			if err != nil && len(err.Error()) > 300 {
				t.Errorf("the error quotes too much: %d bytes", len(err.Error()))
			}
		})
	}
}

func TestPrepareReportsEverything(t *testing.T) {
	t.Parallel()
	m, err := outbox.NewMessage("order.placed", 1)
	must(t, err)
	_, err = outbox.Prepare(t.Context(), []outbox.Message{{Name: "A", Body: []byte("x")}, m, m}, 0)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"message 0: Name", "message 0: Body", "message 2: ID"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not contain %q", err, want)
		}
	}
}

func TestPrepareAccepts(t *testing.T) {
	t.Parallel()
	msgs := []outbox.Message{
		{Name: "a", Body: []byte("null")},
		{Name: "order-item.re_opened.v2", Body: []byte(`{"ü":1}`), Key: "Kunde/Ü 7", Headers: map[string]string{"x-tenant": "ü"}},
		{Name: "blob", ContentType: "application/octet-stream"},
	}
	got, err := outbox.Prepare(context.Background(), msgs, 10)
	must(t, err)
	for i, m := range got {
		if m.ID.Version() != 7 || m.ContentType == "" {
			t.Errorf("message %d: %+v", i, m)
		}
		if msgs[i].ID != uuid.Nil {
			t.Error("the caller's message was changed")
		}
	}
}

func FuzzCheckName(f *testing.F) {
	for _, seed := range []string{"order.placed", "", ".", "a.", "A", "a-b_c.9", "ü"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if driver.CheckName(name) != nil {
			return
		}
		if name == "" || len(name) > 128 || strings.ToLower(name) != name || strings.ContainsAny(name, " *#\x00\n") {
			t.Errorf("%q was accepted", name)
		}
		if slices.Contains(strings.Split(name, "."), "") {
			t.Errorf("%q has an empty word", name)
		}
	})
}

type placed struct {
	Total int `json:"total"`
}

func TestTypes(t *testing.T) {
	t.Parallel()
	types := new(outbox.Types)
	must(t, outbox.Register[placed](types, "order.placed", outbox.Route{Exchange: "orders"}))
	m, err := types.NewMessage(placed{7})
	if err != nil || m.Name != "order.placed" || string(m.Body) != `{"total":7}` || m.Route.Exchange != "orders" || m.ID.Version() != 7 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := types.NewMessage(&placed{}); err == nil {
		t.Error("an unregistered type was accepted")
	}
	if _, err := types.NewMessage(nil); err == nil {
		t.Error("nil was accepted")
	}
	for name, err := range map[string]error{
		"twice":     outbox.Register[placed](types, "order.placed", outbox.Route{}),
		"name":      outbox.Register[int](types, "Nope", outbox.Route{}),
		"route":     outbox.Register[int](types, "int", outbox.Route{Exchange: "\x00"}),
		"interface": outbox.Register[error](types, "err", outbox.Route{}),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestNewMessage_rejectsUnencodableValue(t *testing.T) {
	t.Parallel()
	if _, err := outbox.NewMessage("a", func() {}); err == nil {
		t.Error("accepted")
	}
}

func TestLaneOf(t *testing.T) {
	t.Parallel()
	// Stored rows depend on these values: they must never change.
	for key, want := range map[string]int{"a": 0, "order-1": 2, "ü": 7} {
		if got := driver.LaneOf(driver.Message{Key: key}); got != want {
			t.Errorf("LaneOf(%q) = %d, want %d", key, got, want)
		}
	}
	used := map[int]bool{}
	for range 1000 {
		m, err := outbox.NewMessage("a", 1)
		must(t, err)
		used[driver.LaneOf(driver.Message{ID: m.ID})] = true
	}
	if len(used) != driver.Lanes {
		t.Errorf("unkeyed messages use %d lanes", len(used))
	}
}

func TestClassOf(t *testing.T) {
	t.Parallel()
	for want, err := range map[driver.Class]error{
		driver.Retryable: errors.New("x"),
		driver.Blocked:   fmt.Errorf("wrapped: %w", &driver.PublishError{Class: driver.Blocked}),
	} {
		if got := driver.ClassOf(err); got != want {
			t.Errorf("ClassOf(%v) = %s", err, got)
		}
	}
}

// Encode takes the place of JSON for the types of a program.
func TestTypes_encode(t *testing.T) {
	t.Parallel()
	no := errors.New("no form")
	types := outbox.Types{Encode: func(v any) ([]byte, string, error) {
		switch v := v.(type) {
		case placed:
			return fmt.Append(nil, v.Total), "text/plain", nil
		case *placed:
			return []byte(`{"total":8}`), "", nil
		}
		return nil, "", no
	}}
	must(t, outbox.Register[placed](&types, "order.placed", outbox.Route{}))
	must(t, outbox.Register[*placed](&types, "order.placed", outbox.Route{}))
	must(t, outbox.Register[int](&types, "number.drawn", outbox.Route{}))
	for body, v := range map[string]any{"text/plain 7": placed{7}, `application/json {"total":8}`: &placed{}} {
		m, err := types.NewMessage(v)
		if err != nil || m.ContentType+" "+string(m.Body) != body || m.ID == uuid.Nil || m.Name != "order.placed" {
			t.Errorf("%+v, %v, want %s", m, err, body)
		}
	}
	if _, err := types.NewMessage(7); !errors.Is(err, no) || !strings.Contains(err.Error(), "number.drawn") {
		t.Error(err)
	}
}

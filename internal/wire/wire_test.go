package wire_test

import (
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestHeaderString(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		in   any
		want string
		ok   bool
	}{
		{"text", "text", true},
		{[]byte("bytes"), "bytes", true},
		{int32(-7), "-7", true},
		{uint8(7), "7", true},
		{1.5, "1.5", true},
		{true, "true", true},
		{time.Unix(0, 0), "1970-01-01T00:00:00Z", true},
		{nil, "", false},
		{[]any{1}, "", false},
		{map[string]any{"a": 1}, "", false},
		{"\xff", "", false},
		{strings.Repeat("a", 1<<20), "", false},
	} {
		if got, ok := wire.HeaderString(tt.in); got != tt.want || ok != tt.ok {
			t.Errorf("HeaderString(%.40v) = %.40q, %v; want %q, %v", tt.in, got, ok, tt.want, tt.ok)
		}
	}
}

type foreign struct{}

func (foreign) Form() string { return "symfony" }

func TestNewForm_rejectsForeignFormat(t *testing.T) {
	t.Parallel()
	if _, err := wire.NewForm(foreign{}); err == nil {
		t.Error("an unknown format was accepted")
	}
}

func TestPublishedAt(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_700_000_000_123)
	id, stamp := ids.Deterministic(at), at.Add(time.Hour)
	event := map[string]string{
		"cloudEvents:specversion": "1.0", "cloudEvents:id": "1", "cloudEvents:source": "/", "cloudEvents:type": "t", "cloudEvents:time": "2026-01-02T03:04:05Z",
	}
	for name, tt := range map[string]struct {
		stamp   time.Time
		headers map[string]string
		id      uuid.UUID
		want    time.Time
	}{
		"a stamp":           {stamp, event, id, stamp},
		"an event":          {time.Time{}, event, id, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
		"the id":            {time.Time{}, nil, id, at},
		"id of version 4":   {time.Time{}, nil, uuid.New(), time.Time{}},
		"nothing at all":    {time.Time{}, nil, uuid.Nil, time.Time{}},
		"an event, no time": {time.Time{}, map[string]string{"cloudEvents:time": "2026-01-02T03:04:05Z"}, id, at},
	} {
		if got := wire.PublishedAt(tt.stamp, tt.headers, tt.id); !got.Equal(tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

func TestTimeInID(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_700_000_000_123)
	for apart, want := range map[time.Duration]bool{
		0: true, 999 * time.Millisecond: true, -999 * time.Millisecond: true, time.Second: false, -time.Second: false, 1 << 62: false,
	} {
		if got := wire.TimeInID(ids.Deterministic(at), at.Add(apart)); got != want {
			t.Errorf("%v apart: %v, want %v", apart, got, want)
		}
	}
}

const a, b = "018f8fad-5bd9-7b46-8f16-570867728950", "018f8fad-5bd9-7b46-8f16-570867728951"

func newSymfony(t *testing.T, f format.Symfony) *wire.Symfony {
	t.Helper()
	s, err := wire.NewSymfony(f)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Only configured stamps are sent: stock Symfony rejects a message with a stamp of an unknown class.
func TestSymfonyHeaders(t *testing.T) {
	t.Parallel()
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	stock := map[string]string{"type": `App\Message\OrderPlaced`}
	for name, tt := range map[string]struct {
		form format.Symfony
		want map[string]string
	}{
		"zero":           {format.Symfony{}, map[string]string{}},
		"stock":          {format.Symfony{Classes: classes}, stock},
		"no class":       {format.Symfony{Classes: map[string]string{"other": "Other"}}, map[string]string{"type": "order.placed"}},
		"the bare stamp": {format.Symfony{IDStamp: "MessageIdStamp"}, map[string]string{"type": "order.placed", "X-Message-Stamp-MessageIdStamp": `[{"messageId":"` + a + `"}]`}},
		"Symfony's own": {format.Symfony{IDStamp: `Symfony\Component\Messenger\Stamp\MessageIdStamp`}, map[string]string{
			"type": "order.placed", `X-Message-Stamp-Symfony\Component\Messenger\Stamp\MessageIdStamp`: `[{"id":"` + a + `"}]`,
		}},
		"the library": {format.Freyr02(), map[string]string{
			"type": "order.placed",
			`X-Message-Stamp-Freyr\MessageBroker\Inbox\MessageIdStamp`:        `[{"messageId":"` + a + `"}]`,
			`X-Message-Stamp-Freyr\MessageBroker\Serializer\MessageNameStamp`: `[{"messageName":"order.placed"}]`,
		}},
		"the library, later": {format.Freyr03(), map[string]string{
			"type": "order.placed",
			`X-Message-Stamp-Freyr\MessageBroker\Contracts\MessageIdStamp`:   `[{"messageId":"` + a + `"}]`,
			`X-Message-Stamp-Freyr\MessageBroker\Contracts\MessageNameStamp`: `[{"messageName":"order.placed"}]`,
		}},
	} {
		s, got := newSymfony(t, tt.form), map[string]string{}
		s.Headers(uuid.MustParse(a), "order.placed", func(name, value string) { got[name] = value })
		if !maps.Equal(got, tt.want) || s.On() != (len(tt.want) > 0) {
			t.Errorf("%s: %q, on %v, want %q", name, got, s.On(), tt.want)
		}
	}
}

func TestSymfonyID(t *testing.T) {
	t.Parallel()
	plain, own := newSymfony(t, format.Symfony{}), newSymfony(t, format.Symfony{IDStamp: `App\Uid`})
	stamp := func(id string) string { return `[{"messageId":"` + id + `"}]` }
	several := map[string]string{`X-Message-Stamp-A\MessageIdStamp`: stamp(a)}
	for _, vendor := range []string{"B", "C", "D", "E", "F"} { // the id is the same at each delivery
		several["X-Message-Stamp-"+vendor+`\MessageIdStamp`] = stamp(b)
	}
	with := func(value string) map[string]string {
		return map[string]string{`X-Message-Stamp-App\MessageIdStamp`: value}
	}
	const symfonys = `X-Message-Stamp-Symfony\Component\Messenger\Stamp\MessageIdStamp`
	own8 := newSymfony(t, format.Symfony{IDStamp: `Symfony\Component\Messenger\Stamp\MessageIdStamp`})
	digits := strings.ReplaceAll(a, "-", "")
	for name, tt := range map[string]struct {
		by       *wire.Symfony
		property string
		headers  map[string]string
		want     string
	}{
		"property":                 {plain, a, with(stamp(b)), a},
		"property is no UUID":      {plain, "17", with(stamp(b)), b},
		"property not canonical":   {plain, "{" + a + "}", nil, ""},
		"nothing":                  {plain, "", nil, ""},
		"bare":                     {plain, "", map[string]string{"X-Message-Stamp-MessageIdStamp": stamp(b)}, b},
		"several":                  {plain, "", several, a},
		"last of two":              {plain, "", with(`[{"messageId":"` + b + `"},{"messageId":"` + a + `"}]`), a},
		"other fields":             {plain, "", with(`[{"messageId":"` + a + `","x":{"y":1}}]`), a},
		"no array":                 {plain, "", with(`{"messageId":"` + a + `"}`), ""},
		"empty array":              {plain, "", with(`[]`), ""},
		"no id":                    {plain, "", with(`[{}]`), ""},
		"a number":                 {plain, "", with(`[{"messageId":7}]`), ""},
		"no UUID":                  {plain, "", with(`[{"messageId":"x"}]`), ""},
		"not JSON":                 {plain, "", with(`O:8:"stdClass"`), ""},
		"huge":                     {plain, "", with(strings.Repeat(" ", 1<<20) + stamp(a)), ""},
		"a stamp of another class": {plain, "", map[string]string{`X-Message-Stamp-App\Uid`: stamp(a)}, ""},
		"configured":               {own, "", map[string]string{`X-Message-Stamp-App\Uid`: stamp(a), `X-Message-Stamp-A\MessageIdStamp`: stamp(b)}, a},
		"Symfony's own":            {plain, "", map[string]string{symfonys: `[{"id":"` + a + `"}]`}, a},
		"Symfony's, configured":    {own8, "", map[string]string{symfonys: `[{"id":"` + a + `"}]`}, a},
		"Symfony's as PHP's class": {own8, "", map[string]string{symfonys: stamp(a)}, a},
		"id in another class":      {plain, "", with(`[{"id":"` + a + `"}]`), a},
		"digits of a v7":           {plain, "", map[string]string{symfonys: `[{"id":"` + digits + `"}]`}, a},
		"digits":                   {plain, "", map[string]string{symfonys: `[{"id":"FFFFFFFFFFFF0123456789abcdef0123"}]`}, "00000000-0000-7123-8567-89abcdef0123"},
		"digits as messageId":      {plain, "", with(stamp("ffffffffffff0123456789abcdef0123")), "00000000-0000-7123-8567-89abcdef0123"},
		"zeros":                    {plain, "", with(stamp("00000000000000000000000000000000")), ""},
		"no digits":                {plain, "", with(stamp("gfffffffffff0123456789abcdef0123")), ""},
		"too few digits":           {plain, "", with(stamp(digits[1:])), ""},
		"a number as id":           {plain, "", with(`[{"messageId":"` + a + `","id":7}]`), a},
		"id of a delivery":         {plain, "", map[string]string{`X-Message-Stamp-Symfony\Component\Messenger\Stamp\TransportMessageIdStamp`: `[{"id":"` + b + `"}]`}, ""},
		"id of a flow":             {plain, "", map[string]string{`X-Message-Stamp-Symfony\Component\Messenger\Stamp\CausationStamp`: `[{"id":"` + b + `"}]`}, ""},
		"configured, another came": {own, "", with(stamp(b)), b},
	} {
		want, _ := uuid.Parse(tt.want)
		if got := tt.by.ID(tt.property, tt.headers); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func TestSymfonyName(t *testing.T) {
	t.Parallel()
	s := newSymfony(t, format.Symfony{Classes: map[string]string{"order.placed": `App\OrderPlaced`}, NameStamp: `App\Name`})
	class := map[string]string{"type": `App\OrderPlaced`}
	for name, tt := range map[string]struct {
		property string
		headers  map[string]string
		want     string
	}{
		"property":            {"a", class, "a"},
		"property is a class": {`App\OrderPlaced`, nil, "order.placed"},
		"class":               {"", class, "order.placed"},
		"unknown class":       {"", map[string]string{"type": `App\Other`}, `App\Other`},
		"stamp":               {"", map[string]string{"type": `App\Other`, `X-Message-Stamp-App\Name`: `[{"messageName":"b"}]`}, "b"},
		"stamp elsewhere":     {"", map[string]string{"type": `App\Other`, `X-Message-Stamp-B\MessageNameStamp`: `[{"messageName":"b"}]`}, "b"},
		"stamp without name":  {"", map[string]string{"type": "c", `X-Message-Stamp-App\Name`: `[{}]`}, "c"},
		"nothing":             {"", nil, ""},
	} {
		if got := s.Name(tt.property, tt.headers); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestNewSymfony_rejects(t *testing.T) {
	t.Parallel()
	_, err := wire.NewSymfony(format.Symfony{
		Classes: map[string]string{"a": `\App\A`, "b": "App.B", "c": `App\C`, "d": `App\C`, "e": "", "f": "A" + strings.Repeat("a", 200)},
		IDStamp: `App\`, NameStamp: "App\nX",
	})
	for _, want := range []string{`Classes["a"]`, `Classes["b"]`, `of "c" and of "d"`, `Classes["e"]`, `Classes["f"]`, "IDStamp", "NameStamp"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := wire.NewSymfony(format.Symfony{IDStamp: "A", NameStamp: "A"}); err == nil {
		t.Error("one class for two stamps was accepted")
	}
}

func FuzzSymfony(f *testing.F) {
	f.Add(`[{"messageId":"019da3b2-7c4d-7e8f-a1b2-c3d4e5f60718","messageName":"a"}]`)
	f.Add(`[{"id":"ffffffffffff0123456789abcdef0123"}]`)
	f.Add(`[{"id":"00000000-0000-0000-0000-000000000000"}]`)
	f.Add(`[[]]`)
	s, _ := wire.NewSymfony(format.Symfony{})
	f.Fuzz(func(t *testing.T, value string) {
		headers := map[string]string{"X-Message-Stamp-MessageIdStamp": value, "X-Message-Stamp-MessageNameStamp": value}
		if s.ID("", headers) != uuid.Nil != wire.CarriesID("X-Message-Stamp-MessageIdStamp", value) {
			t.Errorf("%q has an id, and has none", value)
		}
		if name := s.Name("", headers); len(name) > 3*len(value) {
			t.Errorf("the name %q of %q", name, value)
		}
	})
}

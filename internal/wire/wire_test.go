package wire_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/wire"
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

func TestFormOfSomebodyElseIsRefused(t *testing.T) {
	t.Parallel()
	if _, err := wire.NewForm(foreign{}); err == nil {
		t.Error("a format was taken that nobody here knows")
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

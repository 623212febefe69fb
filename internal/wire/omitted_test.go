package wire_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/wire"
)

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

package outboxredis_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// Messages of a split stream are in the partitions of their keys, in their order; others are as before.
func TestPartitions(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	p := newPublisher(t, client, outboxredis.Config{
		Stream: "orders", Partitions: map[string]int{"orders": 4, "one": 1},
		Routes: map[string]outbox.Route{"audit": {Exchange: "audit"}, "one": {Exchange: "one"}},
	})
	want := map[string][]uuid.UUID{}
	for i := range 120 {
		m := driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "order", Key: fmt.Sprintf("key-%d", i%30)}
		stream := ""
		switch i % 10 {
		case 0:
			m.Name, stream = "audit", "audit"
		case 1:
			m.Name, stream = "one", "one"
		case 2:
			m.Key = ""
			stream = partition.Name("orders", partition.Of("", m.ID.String(), 4))
		default:
			stream = partition.Name("orders", partition.Of(m.Key, "", 4))
		}
		want[stream] = append(want[stream], m.ID)
		must(t, publish(t, p, m))
	}
	if len(want) != 6 {
		t.Fatalf("messages for %d streams, want 6", len(want))
	}
	for stream, messages := range want {
		got, err := received(t.Context(), client, stream)
		if err != nil || len(got) != len(messages) {
			t.Errorf("stream %s has %d messages, want %d; %v", stream, len(got), len(messages), err)
			continue
		}
		for i, m := range got {
			if m.ID != messages[i] {
				t.Errorf("message %d of stream %s is %v, want %v", i, stream, m.ID, messages[i])
			}
		}
	}
	if n := client.DBSize(t.Context()).Val(); int(n) != len(want) {
		t.Errorf("%d streams, want %d", n, len(want))
	}
}

// Check looks at each partition, and bad numbers are refused.
func TestPartitionsChecked(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	must(t, client.Set(t.Context(), "orders.3", "1", 0).Err())
	for n, want := range map[int]int{0: 0, 3: 0, 4: 1} {
		p := newPublisher(t, client, outboxredis.Config{Partitions: map[string]int{"orders": n}})
		if err := p.Check(t.Context()); mends(err) != want {
			t.Errorf("%d partitions: %v", n, err)
		}
	}
	_, err := outboxredis.NewPublisher(client, outboxredis.Config{Partitions: map[string]int{"a": 65, "b": -1, "c": 64}})
	if err == nil || !strings.Contains(err.Error(), `of "a": 65`) || !strings.Contains(err.Error(), `of "b": -1`) || strings.Contains(err.Error(), `"c"`) {
		t.Errorf("refused with %v", err)
	}
}

// What is published is what a real Symfony Messenger has handled, as `make interop RECORD=1` has seen it.
func TestRecorded(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	for name, form := range map[string]format.Symfony{
		"stock": {Classes: classes}, "stamp": {Classes: classes, IDStamp: `App\Messenger\MessageIdStamp`}, "library": format.Freyr02(),
	} {
		text, err := os.ReadFile(filepath.Join("testdata/recorded", name+".json"))
		must(t, err)
		var want struct {
			Fields map[string]any
			Want   struct{ Body string }
		}
		must(t, json.Unmarshal(text, &want))
		field := func(name string) string { s, _ := want.Fields[name].(string); return s }
		created, err := time.Parse(time.RFC3339Nano, field("created-at"))
		must(t, err)
		p := newPublisher(t, client, outboxredis.Config{Stream: name, Format: form})
		err = publish(t, p, driver.Message{
			ID: uuid.MustParse(field("id")), Name: field("name"), Body: []byte(want.Want.Body), ContentType: field("content-type"),
			Headers: map[string]string{"tenant": "go"}, CreatedAt: created,
		})
		must(t, err)
		if got := client.XRange(t.Context(), name, "-", "+").Val(); len(got) != 1 || !maps.Equal(got[0].Values, want.Fields) {
			t.Errorf("%s: published %v, recorded was %v", name, got, want.Fields)
		}
	}
}

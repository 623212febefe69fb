package outboxredis_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/symfony"
)

// What is published is what a real Symfony Messenger has handled, as `make interop RECORD=1` has seen it.
func TestRecorded(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	classes := map[string]string{"order.placed": `App\Message\OrderPlaced`}
	for name, format := range map[string]symfony.Format{
		"stock": symfony.Stock(classes), "stamp": {Classes: classes, IDStamp: `App\Messenger\MessageIdStamp`}, "library": symfony.Freyr02(),
	} {
		text, err := os.ReadFile(filepath.Join("testdata/recorded", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var want struct {
			Fields map[string]any
			Want   struct{ Body string }
		}
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatal(err)
		}
		field := func(name string) string { s, _ := want.Fields[name].(string); return s }
		created, err := time.Parse(time.RFC3339Nano, field("created-at"))
		if err != nil {
			t.Fatal(err)
		}
		p := newPublisher(t, client, outboxredis.Config{Stream: name, Format: format})
		err = publish(t, p, driver.Message{
			ID: uuid.MustParse(field("id")), Name: field("name"), Body: []byte(want.Want.Body), ContentType: field("content-type"),
			Headers: map[string]string{"tenant": "go"}, CreatedAt: created,
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := client.XRange(t.Context(), name, "-", "+").Val(); len(got) != 1 || !maps.Equal(got[0].Values, want.Fields) {
			t.Errorf("%s: published %v, recorded was %v", name, got, want.Fields)
		}
	}
}

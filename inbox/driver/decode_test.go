package driver_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

type payload struct {
	Number int            `json:"number"`
	At     time.Time      `json:"at"`
	More   map[string]any `json:"more"`
}

func TestDecode(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{"", "application/json", "application/json; charset=utf-8", "application/cloudevents+json", "APPLICATION/JSON"} {
		m := &inbox.Message{Body: []byte(` {"number": 7, "new": [1]} `), ContentType: contentType}
		if got, err := driver.Decode[payload](m); err != nil || got.Number != 7 {
			t.Errorf("%q: %+v, %v", contentType, got, err)
		}
	}
	if got, err := driver.Decode[*payload](&inbox.Message{Body: []byte(`{"number":7}`)}); err != nil || got.Number != 7 {
		t.Errorf("pointer: %+v, %v", got, err)
	}
}

func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]*inbox.Message{
		"nothing":      {},
		"null":         {Body: []byte(" null\n")},
		"broken":       {Body: []byte(`{"number":`)},
		"trailing":     {Body: []byte(`{"number":1} {"number":2}`)},
		"wrong type":   {Body: []byte(`{"number":"secret"}`)},
		"own decoding": {Body: []byte(`{"at":"secret"}`)},
		"not JSON":     {Body: []byte(`{}`), ContentType: "application/x-protobuf"},
		"bad type":     {Body: []byte(`{}`), ContentType: ";;"},
		"deep":         {Body: []byte(`{"more":{"a":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}}`)},
		"huge":         {Body: make([]byte, driver.MaxBodyBytes+1)},
	} {
		got, err := driver.Decode[payload](m)
		if f := driver.Classify(err); f.Class != driver.ClassValidation || f.Action != driver.ActionDead {
			t.Errorf("%s: error %v classified %+v", name, err, f)
			continue
		}
		if strings.Contains(err.Error(), "secret") || !reflect.ValueOf(got).IsZero() {
			t.Errorf("%s: error %q, value %+v", name, err, got)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{"number":1}`, `null`, ``, `[]`, `{"number":1e400}`, `{"at":"x"}`, "\xff"} {
		f.Add([]byte(seed), "application/json")
	}
	f.Fuzz(func(t *testing.T, body []byte, contentType string) {
		_, err := driver.Decode[payload](&inbox.Message{Body: body, ContentType: contentType})
		switch {
		case err == nil && !json.Valid(body):
			t.Errorf("accepted %q", body)
		case err != nil && driver.Classify(err).Class != driver.ClassValidation:
			t.Errorf("class of %v", err)
		}
	})
}

func TestMaxParked(t *testing.T) {
	t.Parallel()
	if n := driver.ConsumerDefaults(inbox.ConsumerConfig{}, "orders").MaxParked; n != 100_000 {
		t.Errorf("the default is %d", n)
	}
	err := driver.CheckConsumer(driver.ConsumerDefaults(inbox.ConsumerConfig{MaxParked: -1}, "orders"))
	if err == nil || !strings.Contains(err.Error(), "MaxParked -1") {
		t.Errorf("a negative one: %v", err)
	}
}

package headers_test

import (
	"net/http"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

func BenchmarkRoundTrip(b *testing.B) {
	h := http.Header{"Content-Type": {"application/json"}, "Location": {"/things/1"}}
	text, _ := headers.Encode(h)
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = headers.Encode(h)
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = headers.Decode(text)
		}
	})
}

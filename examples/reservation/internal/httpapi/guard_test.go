package httpapi_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
)

func TestLimitsAtConstruction(t *testing.T) {
	t.Parallel()
	s := newShop(t, 0)
	for _, limits := range [][2]int{{0, 0}, {-1, 0}, {1, -1}} {
		_, err := httpapi.New(httpapi.Config{
			Backend: s.parts.Shop, Keys: s.parts.Keys, Limiter: s.parts.Limiter, UserLimit: limits[0], GlobalLimit: limits[1],
		})
		if err == nil {
			t.Errorf("limits of %v are taken", limits)
		}
	}
}

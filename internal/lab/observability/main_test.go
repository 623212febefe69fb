package observability

import (
	"os"
	"testing"

	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	logging.Disable() // of go-redis, whose server is away in the exercises
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

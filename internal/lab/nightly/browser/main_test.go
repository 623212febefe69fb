package browser_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

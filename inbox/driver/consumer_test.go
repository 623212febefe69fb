package driver_test

import (
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

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

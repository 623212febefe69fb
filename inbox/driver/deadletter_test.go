package driver_test

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

func TestNewDeadLetter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m := &inbox.Message{ID: ids.New(), Name: "order.placed", Body: []byte(`{}`), Attempt: 1}
	m.Attempt = 6
	d := driver.NewDeadLetter(m, driver.Classify(errors.New("boom")), "billing", now)
	if d.Class != "default" || d.Attempts != 6 || d.Error != "boom" || d.Consumer != "billing" ||
		!d.FirstFailedAt.Equal(now) || !d.FailedAt.Equal(now) || d.Message.ID != m.ID {
		t.Errorf("dead letter = %+v", d)
	}
	m.FirstFailedAt = now.Add(-time.Hour)
	long := errors.New(strings.Repeat("ä", 1000) + "\xff")
	d = driver.NewDeadLetter(m, driver.Classify(long), "billing", now)
	if !d.FirstFailedAt.Equal(m.FirstFailedAt) || len(d.Error) > driver.MaxErrorBytes || !utf8.ValidString(d.Error) || !strings.HasSuffix(d.Error, "ä…") {
		t.Errorf("first failure %v, error of %d bytes %q", d.FirstFailedAt, len(d.Error), d.Error)
	}
}

func TestDeadLetterQueue(t *testing.T) {
	t.Parallel()
	if got := driver.DeadLetterQueue("", driver.ClassDefault); got != "failed.default" {
		t.Error(got)
	}
	if got := driver.DeadLetterQueue("shop.", "payment"); got != "shop.failed.payment" {
		t.Error(got)
	}
}

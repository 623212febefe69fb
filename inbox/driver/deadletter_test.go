package driver_test

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

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

func TestFilter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	d := inbox.DeadLetter{Message: inbox.Message{ID: ids.New(), Name: "a"}, Class: "default", FailedAt: now, Error: "Connection refused"}
	for name, tt := range map[string]struct {
		filter inbox.Filter
		want   bool
	}{
		"zero":        {inbox.Filter{}, true},
		"id":          {inbox.Filter{IDs: []uuid.UUID{ids.New(), d.Message.ID}}, true},
		"other id":    {inbox.Filter{IDs: []uuid.UUID{ids.New()}}, false},
		"class":       {inbox.Filter{Class: "default", Name: "a"}, true},
		"other class": {inbox.Filter{Class: "validation"}, false},
		"other name":  {inbox.Filter{Name: "b"}, false},
		"from":        {inbox.Filter{FailedAfter: now}, true},
		"later":       {inbox.Filter{FailedAfter: now.Add(1)}, false},
		"until":       {inbox.Filter{FailedBefore: now}, false},
		"before":      {inbox.Filter{FailedBefore: now.Add(1)}, true},
		"error":       {inbox.Filter{ErrorContains: "connection R"}, true},
		"other error": {inbox.Filter{ErrorContains: "timeout"}, false},
	} {
		if got := driver.Match(tt.filter, d); got != tt.want {
			t.Errorf("%s: Match = %v", name, got)
		}
	}
}

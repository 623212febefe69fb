package inboxtest

import (
	"cmp"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/txretry"
)

// New returns an inboxpgx.Store whose entries and ledger are in memory. The Transactor is a
// txretrytest.Manager: an entry is undone when its transaction rolls back. Entries older than
// Config.Retention go when others are written, but for those of parked messages. Config.Entries is ignored.
func New(t txretry.Transactor, consumer string, cfg inboxpgx.Config) (*inboxpgx.Store, error) {
	cfg.Entries = memory.NewEntries(cmp.Or(cfg.Retention, driver.DefaultRetention))
	return inboxpgx.New(t, consumer, cfg)
}

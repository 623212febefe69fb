package outbox

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Leases are short, so that the lanes of a relay that was killed are soon free. Few batches take
// longer than a quarter of one: these renew theirs.
const (
	renewalsPerLease = 4
	retriesPerLease  = 16
)

// hold renews leases that began at begin, until release is called. The context that it returns ends
// when they could not be renewed in time, or another relay has one of them.
func (rs *rounds) hold(ctx context.Context, leases []driver.Lease, begin time.Time) (held context.Context, release func()) {
	held, lose := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	renewing.Add(1)
	first := begin.Add(rs.cfg.LeaseTTL / renewalsPerLease)
	timer := time.AfterFunc(time.Until(first), func() {
		defer renewing.Done()
		defer lose()
		rs.renew(held, leases, begin.Add(rs.cfg.LeaseTTL))
	})
	return held, func() {
		if timer.Stop() {
			renewing.Done()
		}
		lose()
		renewing.Wait()
	}
}

// renew returns when the leases, which end at end, are lost or ctx has ended.
func (rs *rounds) renew(ctx context.Context, leases []driver.Lease, end time.Time) {
	for {
		begin := time.Now()
		// Half of what is left, so that a connection that is silent leaves time for another one.
		try, cancel := context.WithTimeout(ctx, max(end.Sub(begin)/2, rs.cfg.LeaseTTL/retriesPerLease))
		stale, err := rs.source.Renew(try, leases, rs.cfg.LeaseTTL)
		cancel()
		pause := rs.cfg.LeaseTTL / retriesPerLease
		if err == nil && len(stale) == 0 {
			end = begin.Add(rs.cfg.LeaseTTL)
			pause = rs.cfg.LeaseTTL / renewalsPerLease
		}
		if runloop.Sleep(ctx, min(pause, time.Until(end))) != nil {
			return
		}
		if len(stale) > 0 || !time.Now().Before(end) {
			rs.log(ctx, slog.LevelWarn, "outbox: leases ran out, nothing more of their batch is sent", "",
				slog.Int("lanes", len(leases)), slog.Any("error", err))
			return
		}
	}
}

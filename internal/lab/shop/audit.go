package shop

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// learnPatience is how long a read model may take for what was committed.
const learnPatience = 2 * time.Minute

// UntilLearnt waits until the read model shows every reservation.
func (d *Data) UntilLearnt(ctx context.Context) error {
	for patience := time.Now().Add(learnPatience); ; {
		var missing int
		err := d.Conn.QueryRow(ctx, "SELECT (SELECT count(*) FROM reservations) - (SELECT count(*) FROM reservation_states)").Scan(&missing)
		if err != nil || missing == 0 {
			return err
		}
		if time.Now().After(patience) {
			return fmt.Errorf("the read model lacks %d reservations", missing)
		}
		if err := runloop.Sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// Now is the database's clock.
func (d *Data) Now(ctx context.Context) (now time.Time, err error) {
	err = d.Conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now)
	return now, err
}

const oversoldSQL = `
SELECT count(*) FROM (
	SELECT event_id, unnest(seats) FROM reservations WHERE status IN ('held', 'confirmed') GROUP BY 1, 2 HAVING count(*) > 1
) AS twice`

// Audit counts the seats that more than one reservation has. It is an error if fewer reservations are there
// than clients were told of.
func (d *Data) Audit(ctx context.Context, told int) (oversold int, err error) {
	var reservations int
	err = d.Conn.QueryRow(ctx, "SELECT ("+oversoldSQL+"), (SELECT count(*) FROM reservations)").Scan(&oversold, &reservations)
	if err == nil && reservations < told {
		err = fmt.Errorf("%d reservations, and %d clients were told that they have one", reservations, told)
	}
	return oversold, err
}

// A reservation and its row in the read model are written once each here, so xmin is what committed them.
const learntSQL = `
SELECT percentile_disc(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY
	1000 * extract(epoch FROM pg_xact_commit_timestamp(s.xmin) - pg_xact_commit_timestamp(r.xmin))::double precision)
FROM reservations r JOIN reservation_states s ON s.reservation_id = r.id
WHERE r.created_at >= $1`

// Learnt returns p50 and p99 of the milliseconds from the commit of a reservation to the commit that shows
// it in the read model, by the database's clock, of all reservations since then.
func (d *Data) Learnt(ctx context.Context, since time.Time) ([2]float64, error) {
	var waits []float64
	err := d.Conn.QueryRow(ctx, learntSQL, since).Scan(&waits)
	if err == nil && len(waits) != 2 {
		err = fmt.Errorf("no reservation since %v", since)
	}
	if err != nil {
		return [2]float64{}, err
	}
	return [2]float64(waits), nil
}

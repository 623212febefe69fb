package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/chaos/audit"
	"github.com/holdfast-go/holdfast/internal/lab/crowd"
)

// underWaySQL counts what is not done yet.
const underWaySQL = `select (select count(*) from reservations where status = 'held') + (select count(*) from holdfast_outbox)
	+ (select count(*) from reservations r left join reservation_states s on s.reservation_id = r.id where s.status is distinct from r.status)`

// audit compares what customers were told with the history of the database, once that is quiet. They have left.
func (t *trial) audit(ctx context.Context) (faults []string, err error) {
	quiet := eventually(ctx, func(ctx context.Context) error {
		var n int
		if err := t.ask(ctx, underWaySQL, &n); err != nil {
			return err
		}
		if n > 0 {
			return fmt.Errorf("%d reservations or messages are under way", n)
		}
		return nil
	})
	if quiet != nil {
		faults = append(faults, quiet.Error())
	}
	conn, err := pgx.Connect(ctx, t.house.database())
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	h, err := crowd.History(ctx, conn)
	if err != nil {
		return nil, err
	}
	if h.Left.DeadInbox, err = crowd.DeadLetters(ctx, t.house.rabbit[0].AdminURL()); err != nil {
		return nil, err
	}
	answers, unmet := t.crowd.Told()
	h.Answers, faults = answers, append(faults, unmet...)
	if len(h.Reservations) == 0 {
		return nil, errors.New("no customer held a seat")
	}
	for _, f := range audit.Check(h).Findings {
		faults = append(faults, f.Kind+": "+f.Detail)
	}
	return faults, nil
}

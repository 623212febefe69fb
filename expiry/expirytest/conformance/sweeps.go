package conformance

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

func sweeper(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	cfg.Logger, cfg.BatchTimeout = slog.New(slog.DiscardHandler), time.Minute
	sw, err := expiry.NewSweeper(s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sw
}

func testDrain(t *testing.T, b Backend) {
	const rows = 23
	for n := range rows {
		b.Put(t, id(n), held, -time.Minute)
	}
	report, err := sweeper(t, b.Store(t, announce(b)), expiry.SweeperConfig{BatchSize: 5}).Sweep(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if report.Expired != rows || report.Batches != 5 {
		t.Errorf("got %+v, want %d rows in 5 batches", report, rows)
	}
	for n := range rows {
		expect(t, b, id(n), expired, 1)
	}
}

func testPoison(t *testing.T, b Backend) {
	const rows = 40
	poison := []string{id(0), id(1), id(17), id(39)}
	emit := func(ctx context.Context, tx pgx.Tx, batch []expiry.Row) error {
		for _, row := range batch {
			if slices.Contains(poison, row.ID) {
				return errors.New("poison")
			}
		}
		return announce(b)(ctx, tx, batch)
	}
	for n := range rows {
		b.Put(t, id(n), held, -time.Hour+time.Duration(n)*time.Second)
	}
	sw := sweeper(t, b.Store(t, emit), expiry.SweeperConfig{BatchSize: 16})
	report, err := sw.Sweep(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if report.Expired != rows-len(poison) || report.Poisoned != len(poison) {
		t.Errorf("got %+v", report)
	}
	for n := range rows {
		if slices.Contains(poison, id(n)) {
			expect(t, b, id(n), held, 0)
		} else {
			expect(t, b, id(n), expired, 1)
		}
	}
	if again, err := sw.Sweep(t.Context()); err != nil || again.Poisoned != 0 || again.Expired != 0 {
		t.Errorf("the next sweep did %+v, %v; the poison rows are in quarantine", again, err)
	}
}

func testSideBySide(t *testing.T, b Backend) {
	const rows, sweepers = 60, 4
	for n := range rows {
		b.Put(t, id(n), held, -time.Minute)
	}
	s := b.Store(t, announce(b))
	type result struct {
		report expiry.Report
		err    error
	}
	results := make(chan result, sweepers)
	for range sweepers {
		sw := sweeper(t, s, expiry.SweeperConfig{BatchSize: 7})
		go func() {
			report, err := sw.Sweep(t.Context())
			results <- result{report, err}
		}()
	}
	total := 0
	for range sweepers {
		r := <-results
		if lost := new(txretry.LockTimeoutError); r.err != nil && !errors.As(r.err, &lost) {
			t.Error(r.err)
		}
		total += r.report.Expired
	}
	// Where transactions are SERIALIZABLE a sweep may lose all its attempts to the others. The rows it
	// had taken are due still.
	last, err := sweeper(t, s, expiry.SweeperConfig{}).Sweep(t.Context())
	if err != nil {
		t.Error(err)
	}
	total += last.Expired
	if total != rows {
		t.Errorf("%d rows were expired, want %d", total, rows)
	}
	for n := range rows {
		expect(t, b, id(n), expired, 1)
	}
}

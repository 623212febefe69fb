package sim

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
)

// door has requests pass a limit of two a minute.
type door struct{ history }

// ask is a request that is charged, and passes if it is admitted.
func (d *door) ask(user string, admitted bool) context.Context {
	ctx := request{user: user}.visit(context.Background())
	d.step(ctx, shoptest.StepLimit, nil)
	if admitted {
		d.step(ctx, shoptest.StepKey, nil)
	}
	return ctx
}

func (d *door) step(ctx context.Context, step string, err error) {
	_ = d.watch(ctx, step, func() error { return err })()
}

func (d *door) forget() { _ = d.note(forgot, nil, func() error { return nil }) }

// TestLimits: a user passes twice a minute, and once more for what was given back or lost.
func TestLimits(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		play func(d *door)
		want string // empty: nothing is found
	}{
		"twice": {func(d *door) { d.ask("u", true); d.ask("u", true); d.ask("u", false) }, ""},
		"three times": {func(d *door) {
			for range 3 {
				d.ask("u", true)
			}
		}, "u passed for the 3. time in a minute"},
		"of two users": {func(d *door) { d.ask("u", true); d.ask("u", true); d.ask("v", true); d.ask("v", true) }, ""},
		"in the next minute": {func(d *door) {
			d.ask("u", true)
			d.ask("u", true)
			time.Sleep(90 * time.Second) // half of the minute before counts
			d.ask("u", true)
		}, ""},
		"too early in the next minute": {func(d *door) {
			d.ask("u", true)
			d.ask("u", true)
			time.Sleep(89 * time.Second)
			d.ask("u", true)
		}, "after 2 times in the one before"},
		"after a refund": {func(d *door) {
			d.ask("u", true)
			d.step(d.ask("u", true), shoptest.StepRefund, nil)
			d.ask("u", true)
		}, ""},
		"after a refund of the minute before": {func(d *door) {
			d.ask("u", true)
			free := d.ask("u", true)
			time.Sleep(time.Minute)
			d.step(free, shoptest.StepRefund, nil)
			d.ask("u", true)
		}, ""},
		"after a refund that was refused": {func(d *door) {
			d.ask("u", true)
			d.step(d.ask("u", true), shoptest.StepRefund, errors.New("no"))
			d.ask("u", true)
		}, "u passed for the 3. time"},
		"after a second refund of one unit": {func(d *door) {
			d.ask("u", true)
			free := d.ask("u", true)
			d.step(free, shoptest.StepRefund, nil)
			d.step(free, shoptest.StepRefund, nil)
			d.ask("u", true)
			d.ask("u", true)
		}, "u passed for the 3. time"},
		"before a refund": {func(d *door) {
			d.ask("u", true)
			free := d.ask("u", true)
			d.ask("u", true)
			d.step(free, shoptest.StepRefund, nil)
		}, "u passed for the 3. time"},
		"after a loss": {func(d *door) { d.ask("u", true); d.ask("u", true); d.forget(); d.ask("u", true); d.ask("u", true) }, ""},
		"too often after a loss": {func(d *door) {
			d.ask("u", true)
			d.forget()
			for range 3 {
				d.ask("u", true)
			}
		}, "u passed for the 3. time"},
		"without a charge": {func(d *door) { d.step(request{user: "u"}.visit(context.Background()), shoptest.StepKey, nil) }, "u passed the limit and was not charged"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { // whose clock begins with a minute
				d := &door{newHistory()}
				d.limit = 2
				tc.play(d)
				c := &checker{history: &d.history}
				c.limits()
				found := strings.Join(c.findings, "\n")
				if tc.want == "" && found != "" || !strings.Contains(found, tc.want) {
					t.Errorf("found %q, want %q", found, tc.want)
				}
			})
		})
	}
}

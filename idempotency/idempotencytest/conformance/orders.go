package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// testOrders has two runs of one key take their steps in every order there is,
// repetitions and steps out of place among them, and compares each answer with
// that of a model.
func testOrders(t *testing.T, store driver.Store, length int) {
	const steps, workers = 8, 8
	orders := make(chan int)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for order := range orders {
				if err := takeOrder(store, order, steps, length); err != nil {
					t.Error(err)
				}
			}
		})
	}
	n := 1
	for range length - 1 { // the last step is always the first run's Begin, which tells what is left
		n *= steps
	}
	for order := range n {
		orders <- order
	}
	close(orders)
	wg.Wait()
}

// takeOrder reads order as a number whose digits are steps.
func takeOrder(store driver.Store, order, steps, length int) error {
	first := newClaim()
	runs, model, taken := [2]driver.Claim{first, rival(first)}, model{holder: nobody, done: nobody}, ""
	for range length {
		run, step := order%steps%2, order%steps/2
		order /= steps
		got, want := take(store, runs[run], run, step), model.take(run, step)
		if taken += fmt.Sprintf(" %d.%s", run, stepNames[step]); got != want {
			return fmt.Errorf("after%s: %q, want %q", taken, got, want)
		}
	}
	return nil
}

var stepNames = [...]string{"Begin", "Extend", "Complete", "Release"}

// take says in a word what came of a step.
func take(store driver.Store, claim driver.Claim, run, step int) string {
	var err error
	switch stepNames[step] {
	case "Begin":
		out, err := store.Begin(context.Background(), claim)
		switch {
		case err != nil:
			return err.Error()
		case out.State == driver.Completed:
			return fmt.Sprint("completed by ", out.Response.Status-200)
		case out.State == driver.Acquired:
			return "acquired"
		}
		return "in progress"
	case "Extend":
		err = store.Extend(context.Background(), claim)
	case "Complete":
		err = store.Complete(context.Background(), claim, driver.Response{Status: 200 + run})
	case "Release":
		err = store.Release(context.Background(), claim)
	}
	switch {
	case errors.Is(err, idempotency.ErrLeaseLost):
		return "lost"
	case err != nil:
		return err.Error()
	}
	return "done"
}

const nobody = -1

// model is a key as it should be.
type model struct{ holder, done int }

func (m *model) take(run, step int) string {
	switch name := stepNames[step]; {
	case name == "Begin" && m.done != nobody:
		return fmt.Sprint("completed by ", m.done)
	case name == "Begin" && m.holder != nobody && m.holder != run:
		return "in progress"
	case name == "Begin":
		m.holder = run
		return "acquired"
	case name == "Complete" && m.done == run:
		return "done"
	case m.holder != run:
		return "lost"
	case name == "Complete":
		m.holder, m.done = nobody, run
	case name == "Release":
		m.holder = nobody
	}
	return "done"
}

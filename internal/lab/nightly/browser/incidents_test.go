package browser_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/history"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestOutageIsSeenAsItHappens cuts off RabbitMQ for two minutes while somebody looks at the page. The verdict turns red within
// 10 s, the chart shows the pause and the waiting messages, and everything turns green again without a reload.
func TestOutageIsSeenAsItHappens(t *testing.T) {
	t.Parallel()
	const outage, within = 2 * time.Minute, 10 * time.Second
	w := newWarehouse(t, works)
	stop := w.writeSteadily(t)
	p := newTab(t)
	p.open(w.url)
	p.awaitVerdict("All good", testenv.Patience)
	p.awaitText("#history", "Done")
	time.Sleep(20 * time.Second) // timing: for the chart

	w.broker.Cut()
	began := time.Now()
	p.awaitVerdict("problem", within)
	t.Logf("red after %v", time.Since(began).Round(time.Millisecond))
	p.await("the problem names the outbox", `/outbox/.test(document.getElementById("verdict").textContent)`)
	p.await("the tab shows it", `document.title.startsWith("(") && document.querySelector('link[rel="icon"]').href.includes("bad")`)
	p.await("it is one problem, with the name of the server", `/1 problem\s+RabbitMQ does not answer: outbox and billing wait/.test(document.getElementById("verdict").textContent)`)
	time.Sleep(time.Until(began.Add(outage))) // timing: the length of the outage

	w.broker.Heal()
	healed := time.Now()
	p.awaitVerdict("All good", time.Minute)
	t.Logf("green %v after the outage", time.Since(healed).Round(time.Millisecond))
	p.await("the page was not reloaded", `performance.getEntriesByType("navigation").length === 1 && performance.timeOrigin < Date.now() - 120000`)
	p.await("the chart has a minute in which nothing was done and messages waited, and others", chartShowsOutage)
	stop()
	w.awaitDone(t)
}

// chartShowsOutage looks at the table of the chart: done is in the second column, waiting in the fifth.
const chartShowsOutage = `((rows) => {
	const number = (row, column) => Number(row.cells[column].textContent.replace(/[,+]/g, ""));
	return rows.some((r) => number(r, 1) === 0 && number(r, 4) > 0) && rows.some((r) => number(r, 1) > 0);
})([...document.querySelectorAll("#history-table tbody tr")])`

// works is a handler that always succeeds.
func works(string) error { return nil }

// TestPoisonedDeploy deploys a handler that fails for one kind of message. Somebody who sees the page for the first time finds
// the failure, reads its reason and a message, and sends all again after the fix, with less than ten clicks.
func TestPoisonedDeploy(t *testing.T) {
	t.Parallel()
	const most = 9
	w := newWarehouse(t, func(name string) error {
		if name == "order.refunded" {
			return inbox.Unrecoverable(errors.New("refund: column \"fee\" of relation \"refunds\" does not exist"))
		}
		return nil
	})
	const each = 12
	for range each {
		w.write(t, "order.placed")
		w.write(t, "order.refunded")
	}
	v := &visitor{tab: newTab(t)}
	v.open(w.url)
	v.awaitText("#verdict", fmt.Sprint("billing: ", each, " dead letters"))
	v.choose("#verdict li a", "Dead letters by kind")
	v.awaitText(".cards .count", fmt.Sprint(each))
	v.awaitText(".cards", "order.refunded")
	v.awaitText(".cards .error", `column "fee"`)
	v.await("one kind", `document.querySelectorAll(".cards .card").length === 1`)
	v.choose(".cards a[href^='dead-letter?']", "Dead letter")
	v.choose(`a[href*="body=1"]`, "Dead letter")
	v.awaitText("pre", `"order":`)

	w.deploy(works)
	v.choose(`nav a[href="groups"]`, "Dead letters by kind")
	v.choose(`.cards a[href*="what=retry"]`, "Preview")
	v.awaitText(".headline", fmt.Sprint(each, " would be sent again"))
	v.fill(`input[name="reason"]`, "column added")
	v.choose(".actions button", "Change")
	v.awaitText("#live", fmt.Sprint(each, " retried"))
	v.choose(`nav a[href="./"]`, "Status")
	v.awaitVerdict("All good", testenv.Patience)
	if v.clicks > most {
		t.Errorf("it took %d clicks, want at most %d", v.clicks, most)
	}
	t.Logf("%d clicks", v.clicks)
	w.awaitDone(t)
}

// visitor counts clicks.
type visitor struct {
	*tab
	clicks int
}

// choose clicks on something that leads to another view. The click fails if it is not visible.
func (v *visitor) choose(selector, heading string) {
	v.t.Helper()
	v.clicks++
	v.run("mark the view", chromedp.Evaluate[chromedp.Void](`document.body.dataset.left = ""`))
	v.click(selector)
	v.await(selector+" leads to "+heading, fmt.Sprintf(`document.readyState === "complete" && !("left" in document.body.dataset) && document.querySelector("h1").textContent === %q`, heading))
}

// awaitVerdict waits for a part of the verdict's headline.
func (p *tab) awaitVerdict(part string, within time.Duration) {
	p.t.Helper()
	began := time.Now()
	for {
		headline := ask(p, "verdict", chromedp.Evaluate[string](`document.querySelector("#verdict .headline").textContent`))
		if strings.Contains(headline, part) {
			return
		}
		if time.Since(began) > within {
			p.t.Fatalf("after %v the verdict is %q, want %q", within, headline, part)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// warehouse is a service on real servers: an outbox and an inbox on Postgres, and RabbitMQ behind a proxy.
type warehouse struct {
	url    string
	broker *testenv.Proxy

	transactor *txretry.Manager
	store      *outboxpgx.Store
	inbox      *inboxpgx.Store
	handle     atomic.Pointer[handler]
	written    atomic.Int64
}

// handler processes a message of a name.
type handler func(name string) error

// newWarehouse starts a service with a page. Its handler is handle, until deploy replaces it.
func newWarehouse(t *testing.T, handle handler) *warehouse {
	t.Helper()
	pool, schema := pgtest.NewSchema(t)
	broker := amqptest.New(t)
	w := &warehouse{broker: testenv.NewProxy(t, broker.URL)}
	w.deploy(handle)
	dial := outboxamqp.Dial(w.broker.URL(), amqp.Config{Heartbeat: 2 * time.Second})
	var err error
	w.transactor, err = txretry.New(pool, txretry.Config{Logger: quiet.Logger})
	check(t, err)
	w.store, err = outboxpgx.New(pool, outboxpgx.Config{Schema: schema, Logger: quiet.Logger})
	check(t, err)
	w.inbox, err = inboxpgx.New(w.transactor, "billing", inboxpgx.Config{Schema: schema, Logger: quiet.Logger})
	check(t, err)
	for _, name := range []string{"order.placed", "order.refunded"} {
		check(t, inboxpgx.Handle(w.inbox, name, func(context.Context, pgx.Tx, map[string]int) error { return (*w.handle.Load())(name) }))
	}
	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{Exchange: "orders", Logger: quiet.Logger})
	check(t, err)
	relay, err := outbox.NewRelay(w.store, publisher, outbox.RelayConfig{Logger: quiet.Logger})
	check(t, err)
	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Name: "billing", Bindings: []inboxamqp.Binding{{Exchange: "orders", Key: "order.*"}}}, w.inbox, quiet)
	check(t, err)
	kept, err := operator.NewPostgresHistory(pool)
	check(t, err)
	for _, prepare := range []func(context.Context) error{w.store.Migrate, w.inbox.Migrate, kept.Migrate, publisher.Setup, consumer.Setup} {
		check(t, prepare(t.Context()))
	}
	cfg := operator.Config{
		Outboxes:  []operator.Outbox{{Store: w.store, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: w.inbox}},
		History:   kept,
		Servers: []operator.Server{{Name: "RabbitMQ", Ping: func(ctx context.Context) error {
			conn, err := dial(ctx)
			if err != nil {
				return err
			}
			return conn.Close()
		}}},
	}
	recorder, err := history.New(cfg)
	check(t, err)
	for _, part := range []func(context.Context) error{relay.Run, consumer.Run, recorder.Run} {
		run(t, part)
	}
	w.url = site(t, cfg)
	return w
}

// deploy replaces the handler.
func (w *warehouse) deploy(handle handler) { w.handle.Store(&handle) }

// write writes a message in a transaction of its own.
func (w *warehouse) write(t *testing.T, name string) {
	t.Helper()
	m, err := outbox.NewMessage(name, map[string]int{"order": int(w.written.Add(1))})
	check(t, err)
	ctx := context.WithoutCancel(t.Context()) // a writer ends in a cleanup
	check(t, w.transactor.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return w.store.Write(ctx, tx, m) }))
}

// writeSteadily writes five messages a second until the returned function is called.
func (w *warehouse) writeSteadily(t *testing.T) (stop func()) {
	t.Helper()
	end := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				w.write(t, "order.placed")
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		writing.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// awaitDone waits until every message was processed once.
func (w *warehouse) awaitDone(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, func() error {
		done, err := w.inbox.Processed(t.Context(), time.Hour)
		if err == nil && done != int(w.written.Load()) {
			err = fmt.Errorf("%d of %d messages were processed", done, w.written.Load())
		}
		return err
	})
}

package browser_test

import (
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// post has the page send a crowd's requests for the shown event: each worker sends one after the other, and asks again
// where its request is under way. What comes back tells how often each answer was given.
const post = `(async (requests, workers, sameKey) => {
	const { describe, newKey, post } = await import("/shop/api.js");
	const event = document.getElementById("event").value, key = newKey(), ids = new Set(), answers = {};
	let next = 0;
	const worker = async () => {
		while (next < requests) {
			const user = sameKey ? "crowd" : "crowd-" + next;
			const mine = sameKey ? key : newKey();
			next++;
			let answer;
			do answer = await post(user, "/api/reservations", { event_id: event, quantity: 1 }, mine);
			while (answer.code === "IDEMPOTENCY_KEY_IN_USE");
			answers[describe(answer)] = (answers[describe(answer)] ?? 0) + 1;
			if (answer.status === 201) ids.add(answer.json.id);
		}
	};
	await Promise.all(Array.from({ length: workers }, worker));
	return { answers, made: ids.size };
})`

// crowd is what a crowd was answered.
type crowd struct {
	Answers map[string]int `json:"answers"`
	Made    int            `json:"made"`
}

func (v *visit) crowd(arguments string) crowd {
	v.t.Helper()
	return ask(v.tab, "a crowd", chromedp.Evaluate[crowd](post+arguments, chromedp.EvalAwaitPromise))
}

// TestCrowdOnServers looks at the map and the counts while others buy: the buttons for that are in memory only.
func TestCrowdOnServers(t *testing.T) {
	t.Parallel()
	v := openShopOn(t, shop.Shared(t))
	if c := v.crowd("(200, 20, false)"); c.Made != 50 || c.Answers["201"] != 50 || c.Answers["409 SEATS_UNAVAILABLE"] != 150 {
		t.Errorf("200 buyers of 50 seats: %+v", c)
	}
	v.awaitHeld(50)
	v.awaitText("#stats", "50 held")
}

// TestDuplicatesOnServers has a limit that no crowd uses up, since each duplicate takes a unit until it is answered.
func TestDuplicatesOnServers(t *testing.T) {
	t.Parallel()
	v := openShopOn(t, shop.Shared(t), "-user-limit=100")
	if c := v.crowd("(50, 50, true)"); c.Made != 1 || c.Answers["201"] != 50 {
		t.Errorf("50 times the same: %+v", c)
	}
	v.awaitHeld(1)
	v.awaitText("#stats", "1 held")
}

// TestServersKilled has Postgres and Redis killed and started again, and the network to RabbitMQ cut.
func TestServersKilled(t *testing.T) {
	t.Parallel()
	database, redis := testenv.Private(t, testenv.Postgres), testenv.Private(t, testenv.Redis, "--appendonly", "yes")
	broker := testenv.NewProxy(t, amqptest.New(t).URL)
	v := openShopOn(t, shop.Servers{Database: database.URL(), Redis: redis.URL(), Broker: broker.URL()})
	v.hold("A1")
	v.awaitText("#stats", "1 held")

	check(t, database.Kill())
	v.awaitText("#stats", "The shop cannot be read now (503")
	v.click(seat("A2", "free"))
	v.awaitText("#status", "503 ")
	check(t, database.Start(t.Context()))
	v.awaitText("#stats", "1 held")
	v.hold("A2")
	v.awaitText("#stats", "2 held")

	check(t, redis.Kill())
	v.awaitText("#limits", "Unknown")
	v.click(seat("A3", "free"))
	v.awaitText("#status", "503 ")
	check(t, redis.Start(t.Context()))
	v.awaitText("#limits", "of 10")
	v.hold("A3")
	v.awaitText("#stats", "3 held")

	// The shop sells without the broker, and what it has to tell waits.
	broker.Cut()
	v.hold("A4")
	v.awaitText("#stats", "3 held")
	broker.Heal()
	v.awaitText("#stats", "4 held")
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

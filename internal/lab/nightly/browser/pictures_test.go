package browser_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	lacks "github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// scene is a shop in one state.
type scene struct {
	depth     driver.Depth
	down      bool // the broker
	consumers map[string]inbox.Stats
	poison    int // dead letters of billing
}

// backlog is the number of messages of a relay that is too slow.
const backlog = 38_410

// refused is the error of every part while the broker is down.
const refused = "dial tcp 10.0.0.7:5672: connect: connection refused"

// scenes are the states in the pictures.
func scenes() map[string]scene {
	steady := driver.Depth{Ready: 12, Parked: 3, OldestAge: 40 * time.Millisecond, Leased: 16}
	behind, stuck := steady, steady
	behind.Ready, behind.OldestAge = backlog, 11*time.Minute
	stuck.Ready, stuck.OldestAge = 97_680, 11*time.Minute
	return map[string]scene{
		"calm":    {depth: steady, consumers: map[string]inbox.Stats{"billing": {Waiting: 4}, "mail": {Waiting: 31, PutOff: 12}}},
		"outage":  {depth: stuck, down: true, consumers: map[string]inbox.Stats{"billing": {}, "mail": {PutOff: 12}}},
		"poison":  {depth: steady, poison: 18, consumers: map[string]inbox.Stats{"billing": {Waiting: 2, Retrying: 3}, "mail": {Waiting: 31, PutOff: 12}}},
		"backlog": {depth: behind, consumers: map[string]inbox.Stats{"billing": {Waiting: 12_204, Retrying: 42}, "mail": {Waiting: 31, PutOff: 812}}},
	}
}

// TestOperatorPictures takes the pictures in the operator's README: RECORD=1 writes them to its folder docs.
func TestOperatorPictures(t *testing.T) {
	t.Parallel()
	for name, s := range scenes() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := s.serve(t)
			p := newTab(t)
			p.open(url)
			p.awaitText("#live", "Published")
			p.await("rates", `!document.getElementById("part-outbox").textContent.includes("–")`)
			p.run("unfold", chromedp.Evaluate[chromedp.Void](`document.getElementById("findings")?.setAttribute("open", "")`))
			for _, scheme := range schemes {
				p.scheme(scheme)
				p.run("size", chromedp.EmulateViewport(1000, 760))
				p.picture("modules/operator", name+"-"+scheme)
			}
			p.scheme("light")
			p.run("a phone", chromedp.EmulateViewport(360, 760))
			p.picture("modules/operator", name+"-phone")
			if name == "backlog" {
				p.processes(url)
			}
			if name == "poison" {
				p.letter(url)
			}
		})
	}
}

// processes takes the pictures of the view Running.
func (p *tab) processes(url string) {
	p.t.Helper()
	p.open(url + "running")
	p.awaitText("#live", "2 versions run at once")
	p.picture("modules/operator", "running-phone")
	p.run("size", chromedp.EmulateViewport(1000, 760))
	p.both("modules/operator", "running")
}

// letter takes the picture of a dead letter.
func (p *tab) letter(url string) {
	p.t.Helper()
	p.run("size", chromedp.EmulateViewport(1000, 760))
	p.open(url + "dead-letters")
	p.follow("tbody a", "Dead letter")
	p.follow(`a[href*="body=1"]`, "Dead letter")
	p.both("modules/operator", "letter")
}

// both takes the current view in light and dark.
func (p *tab) both(module, name string) {
	p.t.Helper()
	for _, scheme := range schemes {
		p.scheme(scheme)
		p.picture(module, name+"-"+scheme)
	}
	p.scheme("light")
}

// picture takes the current view for the folder docs of a module.
func (p *tab) picture(module, name string) {
	p.t.Helper()
	const maxPicture = 200 << 10
	dir := p.t.ArtifactDir()
	if os.Getenv("RECORD") != "" {
		dir = filepath.Join("../../../..", module, "docs")
	}
	p.run("to the top", chromedp.Evaluate[chromedp.Void]("document.activeElement.blur(), scrollTo(0, 0)"))
	picture := ask(p, "picture", chromedp.CaptureScreenshot())
	if _, err := png.DecodeConfig(bytes.NewReader(picture)); err != nil || len(picture) > maxPicture {
		p.t.Errorf("%s: %d bytes, %v", name, len(picture), err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), picture, 0o644); err != nil {
		p.t.Error(err)
	}
}

// serve serves the page of a scene.
func (s scene) serve(t *testing.T) (url string) {
	t.Helper()
	cfg := operator.Config{Outboxes: []operator.Outbox{s.outbox(t)}}
	for _, name := range []string{"billing", "mail"} {
		cfg.Consumers = append(cfg.Consumers, operator.Consumer{Name: name, Consumer: s.consumer(t, name), Inbox: processed{s.down}})
	}
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	check(t, err)
	limit := ratelimit.Limit{Name: "checkout", Max: 100, Window: time.Minute}
	_, err = limiter.Allow(t.Context(), ratelimit.Charge{Limit: limit, Key: "all", Cost: 95})
	check(t, err)
	cfg.Limiters = []operator.Limiter{{Name: "requests", Limiter: limiter, Limits: []ratelimit.Limit{limit}, Keys: []string{"all", "ada"}}}
	cfg.History = sceneHistory{s, time.Now()}
	if s.down {
		cfg.Servers = []operator.Server{{Name: "RabbitMQ", Ping: func(context.Context) error { return errors.New(refused) }}}
	}
	if s.depth.Ready == backlog {
		cfg.Parts = []operator.Part{{Name: "inbox", Part: misset{}}}
	}
	return site(t, cfg)
}

// misset is a part with a wrong setting.
type misset struct{}

func (misset) Check(context.Context) error {
	const fix = "run the consumer without a negative PruneInterval, or call Store.Prune"
	return lacks.New("inboxpgx", `entries of consumer "mail" are more than a day older than the retention of 192h0m0s`, fix)
}

// sceneHistory is a day of a scene, whose state began eleven minutes ago.
type sceneHistory struct {
	scene
	from time.Time
}

func (sceneHistory) Add(context.Context, operator.Process, []operator.Figures) (bool, error) {
	return true, nil
}

func (sceneHistory) Leave(context.Context, uuid.UUID) error { return nil }

// Processes returns three processes amid a deploy. A handler of one is late.
func (h sceneHistory) Processes(context.Context) ([]operator.Process, error) {
	now := time.Now()
	working := func(name, key string, attempt int, age time.Duration) inboxdriver.Running {
		since := now.Add(-age)
		return inboxdriver.Running{
			Consumer: "billing", ID: ids.Deterministic(h.from, name+key), Name: name, Key: key, Attempt: attempt, Since: since, Until: since.Add(time.Minute),
		}
	}
	all := []operator.Process{
		{Host: "shop-7d9f", PID: 1, Version: "v1.8.2", Since: now.Add(-50 * time.Hour), Seen: now.Add(-4 * time.Second), InWork: 3, Slowest: []inboxdriver.Running{
			working("order.placed", "customer 812", 1, 94*time.Second), working("order.placed", "customer 77", 1, 41*time.Second),
			working("order.refunded", "customer 9", 3, 2*time.Second),
		}},
		{Host: "shop-2c41", PID: 1, Version: "v1.8.2", Since: now.Add(-49 * time.Hour), Seen: now.Add(-50 * time.Second)},
		{Host: "shop-b6e0", PID: 1, Version: "v1.9.0", Since: now.Add(-2 * time.Minute), Seen: now.Add(-7 * time.Second), InWork: 1, Slowest: []inboxdriver.Running{
			working("order.placed", "customer 313", 1, 12*time.Second),
		}},
	}
	for i := range all {
		all[i].ID, all[i].Roles = ids.Deterministic(h.from, all[i].Host), []string{"relay outbox", "consumer billing", "consumer mail"}
	}
	return all, nil
}

func (h sceneHistory) Read(_ context.Context, day bool) (all []operator.Figures, err error) {
	const began = 11 * time.Minute
	step, length := 10*time.Second, time.Hour
	if day {
		step, length = 5*time.Minute, 24*time.Hour
	}
	now := time.Now().UTC().Truncate(step)
	for at := now.Add(-length); at.Before(now); at = at.Add(step) {
		seconds := step.Seconds()
		wave := 1 + 0.25*math.Sin(float64(at.Unix())/1100) + 0.12*math.Sin(float64(at.Unix())/170)
		ago := now.Sub(at)
		on := ago <= began
		for part, rate := range map[string]float64{"outbox": 148, "billing": 74.8, "mail": 74.8} {
			f := operator.Figures{At: at, Part: part, Done: int64(rate * wave * seconds), Measured: true, Waiting: 12, Retrying: 3}
			switch {
			case on && h.down:
				f.Done, f.Problems, f.Measured = 0, 1, part == "outbox"
				if part == "outbox" {
					f.Waiting = int((began - ago).Seconds() * rate)
				}
			case on && h.poison > 0 && part == "billing":
				f.Dead, f.Failed = min(h.poison, 1+int((began-ago).Seconds()/30)), int64(seconds/10)*3
			case on && h.depth.Ready > 1000 && part == "outbox":
				f.Done, f.Problems = f.Done/3, 1
				f.Waiting = int((began - ago).Seconds() * rate * 2 / 3)
			}
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b operator.Figures) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.Part, b.Part)) })
	return all, nil
}

// sceneStore is an outbox with a depth of the scene.
type sceneStore struct {
	*outboxtest.Store
	depth driver.Depth
	began time.Time
	rate  float64 // of messages stored, and published unless the broker is down
	down  bool
}

func (s *sceneStore) Depth(context.Context) (driver.Depth, error) {
	d := s.depth
	stored := int(time.Since(s.began).Seconds() * s.rate)
	d.Stored = 1_000_000 + int64(stored)
	if s.down {
		d.Ready += stored
	}
	return d, nil
}

// outbox returns an outbox with a relay that runs.
func (s scene) outbox(t *testing.T) operator.Outbox {
	t.Helper()
	store, publisher := outboxtest.New(), outboxtest.NewPublisher()
	publisher.Respond(func(driver.Message) error {
		if s.down {
			return &driver.PublishError{Class: driver.Unavailable, Err: errors.New(refused)}
		}
		return nil
	})
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: quiet.Logger})
	check(t, err)
	m, err := outbox.NewMessage("order.placed", map[string]int{"order": 1})
	check(t, err)
	check(t, txretrytest.New(txretrytest.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
	run(t, relay.Run)
	return operator.Outbox{Store: &sceneStore{store, s.depth, time.Now(), 148, s.down}, Relay: relay}
}

// run runs a part until the test ends.
func run(t *testing.T, part func(context.Context) error) {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- part(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// processed is an inbox that processes a steady number of messages.
type processed struct{ down bool }

func (p processed) Processed(_ context.Context, d time.Duration) (int, error) {
	if p.down {
		return 0, nil
	}
	return int(d.Seconds() * 74.8), nil
}

// sceneConsumer is a consumer with the counts of the scene.
type sceneConsumer struct {
	*inboxtest.Consumer
	stats inbox.Stats
	down  bool
}

func (c sceneConsumer) Stats(ctx context.Context) (inbox.Stats, error) {
	if c.down {
		return inbox.Stats{}, errors.New("inboxamqp: stats: " + refused)
	}
	s, err := c.Consumer.Stats(ctx)
	s.Waiting, s.Retrying, s.PutOff = c.stats.Waiting, c.stats.Retrying, c.stats.PutOff
	return s, err
}

func (c sceneConsumer) Ready(context.Context) error {
	if c.down {
		return errors.New("inboxamqp: no session with the broker: " + refused)
	}
	return nil
}

// consumer returns a consumer, with the dead letters of the scene.
func (s scene) consumer(t *testing.T, name string) operator.DeadLetterer {
	t.Helper()
	broker, mux := inboxtest.NewBroker(), inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		if m.Name == "order.refunded" {
			return inbox.Unrecoverable(errors.New("charge: no such payment: pay_83f1"))
		}
		return inbox.Unrecoverable(fmt.Errorf("decode: json: cannot unmarshal string into Go struct field order.total of type int64"))
	})
	c, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: name}, mux, quiet)
	check(t, err)
	for n := range s.poison {
		if name != "billing" {
			break
		}
		m := &inbox.Message{ID: ids.New(), Name: "order.placed", Key: fmt.Sprint("customer ", n), ContentType: "application/json", Body: fmt.Appendf(nil, `{"order":%d,"total":"12.50","currency":"EUR"}`, 7000+n)}
		if n%6 == 5 {
			m.Name = "order.refunded"
		}
		check(t, broker.Send(t.Context(), m))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	err = broker.Idle(t.Context())
	stop()
	check(t, errors.Join(err, <-ended))
	return sceneConsumer{c, s.consumers[name], s.down}
}

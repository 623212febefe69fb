package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// Goal is how soon after the end of any fault everything should work again.
	Goal = 10 * time.Second
	// observed is the queue or durable consumer that gets every message of the shop, from an exchange or stream.
	observed, exchange = "observed", "reservation"
)

// Symptoms are the symptoms that a recovery must end, in the order of tables.
var Symptoms = []string{"ready", "answers", "outbox", "read model", "due holds"}

// Subject is a running shop.
type Subject struct {
	// Processes are all processes of the shop. Binary starts a process again that has ended by itself.
	Processes shop.Roles
	Binary    string
	// APIs returns the addresses of the processes that clients reach, "" for one that does not listen.
	APIs func() []string
	// DB connects to the current primary.
	DB *pgxpool.Pool
	// Broker is a RabbitMQ or a NATS.
	Broker Broker
	// Hold is how long the shop holds a seat.
	Hold time.Duration
	// Lost returns the changes that failovers to asynchronous standbys have lost so far. Optional.
	Lost func() []audit.Change
	// Amend adds the caller's knowledge to a history before it is checked. Optional.
	Amend func(*audit.History)
	// Seed chooses the actions of the clients.
	Seed uint64
	// Patience is how long a recovery may take. A symptom that remains longer is stuck.
	Patience time.Duration
}

// Watch lets clients buy at a shop, and checks that it keeps its promises.
type Watch struct {
	Subject
	Crowd  *Crowd
	Ledger *Ledger
	// settled is the newest change in the history at the last moment when all was quiet.
	settled int64
	stop    func() // the observer of the broker
}

// NewWatch starts to record the changes in the database and the messages at the broker. The shop must have made its tables
// and its exchange or stream. The caller must Close the watch.
func NewWatch(ctx context.Context, s Subject) (*Watch, error) {
	if _, err := s.DB.Exec(ctx, historySQL); err != nil {
		return nil, err
	}
	if err := s.Broker.prepare(ctx); err != nil {
		return nil, err
	}
	w := &Watch{Subject: s, Ledger: NewLedger()}
	var err error
	if w.Crowd, err = newCrowd(ctx, s.APIs, s.Seed); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Broker.observe(ctx, w.Ledger.deliver)
	}()
	w.stop = func() {
		cancel()
		<-ended
	}
	return w, nil
}

// Close ends the clients and the observer.
func (w *Watch) Close() {
	w.Crowd.Leave()
	w.Crowd.Close()
	w.stop()
}

// Recovery records when each symptom was seen for the last time after a fault's end.
type Recovery struct {
	After map[string]time.Duration
	// Stuck has the reasons for symptoms that remained when patience was over.
	Stuck map[string]error
}

// Total returns when everything worked again, and the last symptom.
func (r Recovery) Total() (longest time.Duration, last string) {
	for _, name := range Symptoms {
		if r.After[name] >= longest {
			longest, last = r.After[name], name
		}
	}
	return longest, last
}

// recover measures how long it takes until no symptom is left. The holds that prove that the apis answer must be published,
// taken and expired, too: otherwise a part with a dead connection might not notice it. ready returns nil when all processes
// are ready.
func (w *Watch) recover(ctx context.Context, ready func(context.Context) error) (Recovery, error) {
	r := Recovery{After: map[string]time.Duration{}, Stuck: map[string]error{}}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, w.Patience)
	defer cancel()
	var mu sync.Mutex
	await := func(symptom string, look func(context.Context) error) bool {
		took, err := untilWell(ctx, began, look)
		mu.Lock()
		defer mu.Unlock()
		r.After[symptom] = took
		if err != nil {
			r.Stuck[symptom] = err
		}
		return err == nil
	}
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { await("ready", ready) })
	if !await("answers", w.Crowd.AllAnswer()) {
		all.Wait()
		return r, nil
	}
	var change int64  // newest change in the history
	var due time.Time // when the current holds are due, by the database's clock
	err := Poll(ctx, func(ctx context.Context) error {
		return w.DB.QueryRow(ctx, "select (select last_value from chaos_history_id_seq), clock_timestamp() + $1", w.Hold).Scan(&change, &due)
	})
	if err != nil {
		all.Wait() // the goroutines write r until then
		return r, fmt.Errorf("postgres does not answer the lab: %w", err)
	}
	all.Go(func() { await("outbox", w.none(outboxSQL, func() []any { return []any{change} })) })
	all.Go(func() {
		await("read model", w.none(untakenSQL, func() []any {
			return []any{change, w.settled, append([]uuid.UUID{}, MessagesOf(w.lost())...)}
		}))
	})
	all.Go(func() {
		_ = runloop.Sleep(ctx, w.Hold) // nothing is due earlier
		await("due holds", w.none(dueSQL, func() []any { return []any{due} }))
		mu.Lock()
		defer mu.Unlock()
		r.After["due holds"] = max(0, r.After["due holds"]-w.Hold)
	})
	all.Wait()
	return r, nil
}

func (w *Watch) lost() []audit.Change {
	if w.Lost == nil {
		return nil
	}
	return w.Lost()
}

// untilWell calls look until it returns nil, and returns the start time of that call.
func untilWell(ctx context.Context, began time.Time, look func(context.Context) error) (time.Duration, error) {
	for {
		asked := time.Now()
		err := look(ctx)
		if err == nil {
			return asked.Sub(began), nil
		}
		if runloop.Sleep(ctx, 100*time.Millisecond) != nil {
			return time.Since(began), err
		}
	}
}

// pollPatience is how long a lab waits for anything that must come, such as a cluster that forms.
const pollPatience = 5 * time.Minute

// Poll calls look until it returns nil. It returns the last error when ctx ends, or after five minutes.
func Poll(ctx context.Context, look func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, pollPatience)
	defer cancel()
	_, err := untilWell(ctx, time.Now(), look)
	return err
}

const outboxSQL = `select count(*) from holdfast_outbox o join chaos_history h on h.message = o.id where h.what = 'message' and h.id <= $1`

const untakenSQL = `select count(*) from chaos_history m where m.id <= $1 and m.id > $2 and m.what = 'message' and m.message <> all ($3)
	and not exists (select from chaos_history t where t.message = m.message and t.what = 'taken')`

const dueSQL = `select count(*) from reservations where status = 'held' and expires_at <= $1`

const heldSQL = `select count(*) from reservations where status = 'held'`

// none checks that a count is 0.
func (w *Watch) none(sql string, args func() []any) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var n int
		if err := w.DB.QueryRow(ctx, sql, args()...).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			return fmt.Errorf("%d left", n)
		}
		return nil
	}
}

// quiet returns when no seat is held and every message has been taken. The clients must have left.
func (w *Watch) quiet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.Patience)
	defer cancel()
	held := w.none(heldSQL, func() []any { return nil })
	return Poll(ctx, func(ctx context.Context) error {
		if err := held(ctx); err != nil {
			return fmt.Errorf("holds: %w", err)
		}
		h, err := w.history(ctx)
		if err != nil {
			return err
		}
		w.Ledger.Excuse(MessagesOf(h.Lost)...)
		if n := w.Ledger.Missing(Deeds(h.Changes)); n > 0 {
			return fmt.Errorf("%d messages have not reached the broker", n)
		}
		if n := h.Left.Outbox; n > 0 {
			return fmt.Errorf("%d messages are left in the outbox", n)
		}
		if n := h.Untaken(); n > 0 {
			return fmt.Errorf("%d messages have taken no effect", n)
		}
		return nil
	})
}

// history reads all recorded data.
func (w *Watch) history(ctx context.Context) (audit.History, error) {
	h, err := readHistory(ctx, w.DB)
	if err != nil {
		return h, err
	}
	h.Answers, _ = w.Crowd.Told()
	h.Lost = w.lost()
	h.Left.DeadInbox, err = w.Broker.deadLetters(ctx)
	return h, err
}

// Judged is the result of an audit.
type Judged struct {
	audit.Report
	History audit.History
	Broker  Verdict
}

// audit waits until nothing is under way, and checks the complete history.
func (w *Watch) audit(ctx context.Context) (j Judged, err error) {
	find := func(kind string, details ...string) {
		for _, detail := range details {
			j.Findings = append(j.Findings, audit.Finding{Kind: kind, Detail: detail})
		}
	}
	quiet := w.quiet(ctx)
	if j.History, err = w.history(ctx); err != nil {
		return j, errors.Join(quiet, err)
	}
	if w.Amend != nil {
		w.Amend(&j.History)
	}
	j.Report = audit.Check(j.History)
	if quiet != nil {
		find(audit.Stuck, "not quiet: "+quiet.Error())
	}
	_, unmet := w.Crowd.Told()
	find(audit.Refused, unmet...)
	w.Ledger.Excuse(MessagesOf(j.History.Lost)...)
	j.Broker = w.Ledger.Audit(Deeds(j.History.Changes))
	find("at the broker", j.Broker.Faults...)
	if n := len(j.History.Changes); n > 0 {
		w.settled = j.History.Changes[n-1].ID
	}
	return j, nil
}

const (
	// holdsBefore is how many holds are made before a fault.
	holdsBefore = 15
	// StartPatience is how long a process may take to listen, on a machine with any load.
	StartPatience = 2 * time.Minute
)

// ErrPromise marks an error of a fault's step as a failure of the shop, such as a process that does not end when asked.
var ErrPromise = errors.New("a promise of the shop is broken")

// Fault is one disturbance with its repair.
type Fault struct {
	Kind, Target string
	Begin        func(ctx context.Context) error
	// Lasts is the time between Begin and End.
	Lasts time.Duration
	// End is nil if the fault is over as soon as it starts.
	End func(ctx context.Context) error
	// Over is called when the fault is over, with its start time. Optional.
	Over func(since time.Time)
	// After restores things that are not part of the recovery, such as a new standby. It runs during the recovery. Optional.
	After func(ctx context.Context) error
}

// happen begins and ends the fault. It returns failures of the shop as broken, and failures of the lab as err.
func (f Fault) happen(ctx context.Context) (broken []string, err error) {
	if f.Over != nil {
		defer f.Over(time.Now())
	}
	steps := []func(context.Context) error{f.Begin, func(ctx context.Context) error { return runloop.Sleep(ctx, f.Lasts) }}
	if f.End != nil {
		steps = append(steps, f.End)
	}
	for _, step := range steps {
		switch err := step(ctx); {
		case errors.Is(err, ErrPromise):
			broken = append(broken, err.Error())
		case err != nil:
			return broken, err
		}
	}
	return broken, nil
}

// Outcome is the result of one fault. Times are in seconds.
type Outcome struct {
	Kind, Target string
	Lasts        float64
	// Held is how many seats clients got during the fault.
	Held int64
	// Recovery is the time from the end of the fault until everything worked, Last is the last symptom, and After has all
	// symptoms.
	Recovery float64
	Last     string
	After    map[string]float64
	// Slow means that the recovery is above the goal.
	Slow bool
	// Slowest is the longest time for an answer.
	Slowest float64
	// Complaints is how many warnings and errors all processes have logged.
	Complaints int
	Findings   []audit.Finding
	// Lost is how many changes a failover to an asynchronous standby has lost. Excused counts the broken promises that all
	// losses so far explain.
	Lost    int
	Excused map[string]int
}

func (o *Outcome) find(kind string, details ...string) {
	for _, detail := range details {
		o.Findings = append(o.Findings, audit.Finding{Kind: kind, Detail: detail})
	}
}

func (o *Outcome) recovered(r Recovery, patience time.Duration) {
	total, last := r.Total()
	o.Recovery, o.Last, o.After, o.Slow = Seconds(total), last, map[string]float64{}, total > Goal
	for name, took := range r.After {
		o.After[name] = Seconds(took)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Stuck)) {
		o.find(audit.Stuck, fmt.Sprintf("%s after %v: %v", name, patience, r.Stuck[name]))
	}
}

// Seconds rounds a duration to tenths of a second.
func Seconds(d time.Duration) float64 {
	return float64(d.Round(100*time.Millisecond)) / float64(time.Second)
}

// String is one line for the outcome, and one for each finding.
func (o Outcome) String() string {
	line := fmt.Sprintf("%-14s %-52s lasts %4.1f s, well again %4.1f s after it (%s), slowest answer %4.1f s, %d complaints",
		o.Kind, o.Target, o.Lasts, o.Recovery, o.Last, o.Slowest, o.Complaints)
	if o.Lost > 0 {
		line += fmt.Sprintf(", %d changes lost", o.Lost)
	}
	if o.Slow {
		line += ", ABOVE THE GOAL"
	}
	for _, f := range o.Findings {
		line += "\n    FOUND " + f.Kind + ": " + f.Detail
	}
	return line
}

// Suffer makes one fault happen under load, measures the recovery, and audits when all is quiet. The error is a failure of
// the lab; the findings are failures of the shop.
func (w *Watch) Suffer(ctx context.Context, f Fault) (o Outcome, j Judged, err error) {
	o = Outcome{Kind: f.Kind, Target: f.Target, Lasts: f.Lasts.Seconds()}
	complaints, lost := w.complaints(), len(w.lost())
	w.Crowd.Come(ctx)
	defer w.Crowd.Leave()
	err = w.underLoad(ctx)
	o.find(audit.Stuck, w.ended(" before the fault")...)
	if err != nil || len(o.Findings) > 0 { // the fault would hide an earlier failure
		return o, j, err
	}
	w.Crowd.ForgetSlowest()
	held := w.Crowd.Holds()
	broken, err := f.happen(ctx)
	o.Held = w.Crowd.Holds() - held
	o.find(audit.Stuck, broken...)
	if err != nil {
		return o, j, err
	}
	after := make(chan error, 1)
	go func() {
		if f.After == nil {
			after <- nil
			return
		}
		after <- f.After(ctx)
	}()
	var ended []string
	r, err := w.recover(ctx, func(context.Context) error {
		names := w.ended("")
		ended = append(ended, names...)
		if err := w.revive(); err != nil {
			return err
		}
		return shop.AllReady(w.Processes)
	})
	o.recovered(r, w.Patience)
	o.find(audit.Stuck, ended...)
	if err := errors.Join(err, <-after); err != nil {
		return o, j, err
	}
	w.Crowd.Leave()
	j, err = w.audit(ctx)
	o.find(audit.Stuck, w.ended(" after the recovery")...)
	o.Findings, o.Excused = append(o.Findings, j.Findings...), j.Excused
	o.Slowest, o.Complaints, o.Lost = w.Crowd.Slowest().Seconds(), w.complaints()-complaints, len(w.lost())-lost
	return o, j, err
}

// underLoad returns when the clients have made some holds, so that there is something to lose.
func (w *Watch) underLoad(ctx context.Context) error {
	before := w.Crowd.Holds()
	return Poll(ctx, func(context.Context) error {
		if n := w.Crowd.Holds() - before; n < holdsBefore {
			return fmt.Errorf("%d of %d holds", n, holdsBefore)
		}
		return nil
	})
}

func (w *Watch) complaints() (n int) {
	for _, p := range w.Processes {
		n += p.Complaints()
	}
	return n
}

// EndedByItself is the text of a finding about a process.
func EndedByItself(name string) string { return name + " ended by itself" }

// ended returns findings about the processes that do not run.
func (w *Watch) ended(when string) (found []string) {
	for _, p := range w.Processes {
		if p.Ended() {
			found = append(found, EndedByItself(p.Name)+when)
		}
	}
	return found
}

// revive restarts the processes that have ended by themselves.
func (w *Watch) revive() error {
	for _, p := range w.Processes {
		if !p.Ended() {
			continue
		}
		if err := p.Start(w.Binary); err != nil {
			return err
		}
		if err := p.AwaitListening(StartPatience); err != nil && !errors.Is(err, shop.ErrEnded) {
			return err
		}
	}
	return nil
}

// prober is the client that checks that the apis answer.
const prober = -1

// AllAnswer returns a check that fails until every api has promptly answered a hold for every large event.
func (c *Crowd) AllAnswer() func(context.Context) error {
	const promptly = 2 * time.Second
	type way struct {
		api   int
		event string
	}
	left := map[way]bool{}
	ways := len(c.apis()) * len(c.large)
	for api := range c.apis() {
		for _, event := range c.large {
			left[way{api, event}] = true
		}
	}
	return func(ctx context.Context) error {
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, w := range slices.Collect(maps.Keys(left)) { // a copy, because the goroutines delete from left
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, promptly)
				defer cancel()
				a := c.send(ctx, prober, w.api, holdRequest(newKey(), w.event, `"quantity":1`))
				mu.Lock()
				defer mu.Unlock()
				if a.Status == http.StatusCreated {
					delete(left, w)
				}
			})
		}
		all.Wait()
		if len(left) > 0 {
			return fmt.Errorf("%d of %d ways to hold a seat do not work", len(left), ways)
		}
		return nil
	}
}

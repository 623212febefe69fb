package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// bench runs tables and checks their goals.
type bench struct {
	out      io.Writer
	length   time.Duration // of one run
	rounds   int
	messages int // drained by one run
	rows     int // of the expiry table, where a tenth is due

	workload string // the running workload
	at       string // the running part of it, for errors
	report   *report
	servers  servers
	shops    *shop.Place // opened on first use
	used     shares      // in the last observed stretch
}

// table compares contenders that do the same work in different ways.
type table struct {
	title      string
	columns    []string                        // of a sample; ratios compare the first column
	prepare    func(ctx context.Context) error // before every run; nil for nothing
	contenders []contender
	yardsticks []string // contenders that the others are compared with
}

type contender struct {
	name string
	run  func(ctx context.Context, length time.Duration) sample
}

// sample is the result of one run, column by column.
type sample []float64

// results are the samples of a table by contender and round.
type results struct {
	table table
	runs  map[string][]sample
	used  map[string][]shares
}

// measure warms up every contender, runs them in turns, and prints the table.
func (b *bench) measure(ctx context.Context, t table) results {
	r := results{table: t, runs: map[string][]sample{}, used: map[string][]shares{}}
	for _, c := range t.contenders {
		b.at = t.title + ": " + c.name
		t.runOnce(ctx, c, min(b.length/2, time.Second))
	}
	for range b.rounds {
		for _, c := range t.contenders {
			b.at = t.title + ": " + c.name
			s, used := b.runObserved(ctx, t, c)
			r.runs[c.name], r.used[c.name] = append(r.runs[c.name], s), append(r.used[c.name], used)
		}
	}
	var text strings.Builder
	b.report.add(b.workload, r).markdown(&text)
	fmt.Fprint(b.out, text.String())
	return r
}

// runObserved runs a contender. It returns the processor shares of the stretch that the run marks, else of the whole run.
func (b *bench) runObserved(ctx context.Context, t table, c contender) (sample, shares) {
	b.used = shares{}
	t.prepared(ctx)
	end := b.observe()
	s := t.runPrepared(ctx, c, b.length)
	if b.used == (shares{}) {
		end()
	}
	return s, b.used
}

func (t table) runOnce(ctx context.Context, c contender, length time.Duration) sample {
	t.prepared(ctx)
	return t.runPrepared(ctx, c, length)
}

func (t table) prepared(ctx context.Context) {
	if t.prepare == nil {
		return
	}
	check(t.prepare(ctx))
}

func (t table) runPrepared(ctx context.Context, c contender, length time.Duration) sample {
	s := c.run(ctx, length)
	check(ctx.Err())
	return s
}

// spread has the median, minimum and maximum of some figures.
type spread struct{ median, least, most float64 }

func spreadOf(figures []float64) spread {
	s := slices.Sorted(slices.Values(figures))
	n := len(s)
	return spread{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1]}
}

func exactly(figure float64) spread { return spread{figure, figure, figure} }

func (r results) column(contender string, col int) spread {
	var figures []float64
	for _, s := range r.runs[contender] {
		figures = append(figures, s[col])
	}
	return spreadOf(figures)
}

// ratio compares the first column, round by round.
func (r results) ratio(contender, yardstick string) spread {
	var ratios []float64
	for round, s := range r.runs[contender] {
		ratios = append(ratios, s[0]/r.runs[yardstick][round][0])
	}
	return spreadOf(ratios)
}

// written formats a figure. NaN, a missing figure, becomes a dash.
func written(figure float64, decimals int) string {
	if math.IsNaN(figure) {
		return "-"
	}
	return strconv.FormatFloat(figure, 'f', decimals, 64)
}

// atLeast and atMost record a goal. The median decides whether it is met.
func (b *bench) atLeast(bound float64, got spread, text string) {
	b.report.Goals = append(b.report.Goals, kept{b.workload, text, got, bound, true, got.median >= bound})
}

func (b *bench) atMost(bound float64, got spread, text string) {
	b.report.Goals = append(b.report.Goals, kept{b.workload, text, got, bound, false, got.median <= bound})
}

// watched are the kinds of servers whose processor time a stopwatch measures.
var watched = [...]testenv.Kind{testenv.Postgres, testenv.RabbitMQ, testenv.Redis}

// stopwatch measures a stretch of a run. The run itself starts and stops it.
type stopwatch struct {
	bench     *bench // nil: no private servers are watched
	began     time.Time
	cpu       time.Duration
	took, ran time.Duration                     // ran: CPU time of this process
	observed  func()                            // ends the stretch
	servers   map[*testenv.Server]time.Duration // CPU time of each
	err       error
}

func (s *stopwatch) start() {
	s.servers = s.serverTimes()
	if s.observed = func() {}; s.bench != nil {
		s.observed = s.bench.observe()
	}
	s.began, s.cpu = time.Now(), load.CPUTime()
}

func (s *stopwatch) stop() {
	s.took, s.ran = time.Since(s.began), load.CPUTime()-s.cpu
	s.observed()
	for server, used := range s.serverTimes() {
		s.servers[server] = used - s.servers[server]
	}
}

func (s *stopwatch) serverTimes() map[*testenv.Server]time.Duration {
	times := map[*testenv.Server]time.Duration{}
	if s.bench == nil {
		return times
	}
	for _, server := range s.bench.servers.launched {
		used, err := server.CPUTime()
		s.err = errors.Join(s.err, err)
		times[server] = used
	}
	return times
}

// sampleColumns are the columns of a sample. Some tables use only the first two.
var sampleColumns = []string{
	"operations/s",
	"client us each",
	"Postgres us",
	"RabbitMQ us",
	"Redis us",
	"busiest one %",
}

// sample returns the figures for n operations. Figures of servers that are not private are NaN. The last figure is the share
// of the busiest server in the time of all servers of its kind.
func (s *stopwatch) sample(n int) sample {
	result := sample{float64(n) / s.took.Seconds(), s.ran.Seconds() * 1e6 / float64(n)}
	busiest := math.NaN()
	for _, kind := range watched {
		var total, most time.Duration
		count := 0
		for server, used := range s.servers {
			if server.Kind() == kind {
				total, most, count = total+used, max(most, used), count+1
			}
		}
		if count == 0 {
			result = append(result, math.NaN())
			continue
		}
		result = append(result, total.Seconds()*1e6/float64(n))
		if count > 1 && total > 0 {
			busiest = 100 * most.Seconds() / total.Seconds()
		}
	}
	return append(result, busiest)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// allocations returns the allocations of one call of f, on average over n calls.
func allocations(n int, f func() error) (float64, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var before, after runtime.MemStats
	for i := range 2 * n {
		if i == n { // the first half is the warm-up
			runtime.ReadMemStats(&before)
		}
		if err := f(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(n), nil
}

// shares are the shares of the machine's processor time during a stretch, by user, in percent.
type shares [users]float64

const (
	ofBench = iota
	ofPostgres
	ofRabbitMQ
	ofRedis
	ofOthers // other processes, the kernel, and the time stolen by the host of a virtual machine
	ofNobody
	users
)

// serverCommands maps the command names of servers that this process started.
var serverCommands = map[string]int{"postgres": ofPostgres, "beam.smp": ofRabbitMQ, "redis-server": ofRedis}

// unmeasured returns shares without figures, for systems that do not report them.
func unmeasured() (u shares) {
	for i := range u {
		u[i] = math.NaN()
	}
	return u
}

// share returns the share of one user over the measured stretches of a contender.
func (r results) share(contender string, user int) spread {
	var percent []float64
	for _, u := range r.used[contender] {
		if !math.IsNaN(u[user]) {
			percent = append(percent, u[user])
		}
	}
	if len(percent) == 0 {
		return exactly(math.NaN())
	}
	return spreadOf(percent)
}

// observe starts a stretch. The returned function ends it and stores the shares in b.used.
func (b *bench) observe() (end func()) {
	before, err := processorTimes()
	return func() {
		after, endErr := processorTimes()
		if err != nil || endErr != nil {
			b.used = unmeasured()
			return
		}
		b.used = sharesBetween(before, after)
	}
}

// processorTime is the processor time of each user since the system or process started.
type processorTime struct {
	by    [users]time.Duration // without ofOthers
	total time.Duration
}

func sharesBetween(before, after processorTime) (u shares) {
	total := after.total - before.total
	if total <= 0 {
		return unmeasured()
	}
	others := 100.0
	for i := range u {
		if i != ofOthers {
			u[i] = max(0, 100*float64(after.by[i]-before.by[i])/float64(total)) // a server may have ended meanwhile
			others -= u[i]
		}
	}
	u[ofOthers] = max(0, others)
	return u
}

func processorTimes() (t processorTime, err error) {
	commands, err := testenv.CPUTimes(os.Getpid())
	if err != nil {
		return t, err
	}
	for command, used := range commands {
		if server, ok := serverCommands[command]; ok {
			t.by[server] += used
		}
	}
	t.by[ofBench] = load.CPUTime()
	t.total, t.by[ofNobody], err = testenv.MachineTimes()
	return t, err
}

package main

import (
	"math"
	"os"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// shares are who used the machine's processors during a stretch, in percent of all their time.
type shares [users]float64

const (
	ofBench = iota
	ofPostgres
	ofRabbitMQ
	ofRedis
	ofOthers // other processes, the kernel, and what the host of a virtual machine took away
	ofNobody
	users
)

var userNames = [users]string{"this process", "Postgres", "RabbitMQ", "Redis", "others", "idle"}

// serverCommands are the commands of servers that this process started.
var serverCommands = map[string]int{"postgres": ofPostgres, "beam.smp": ofRabbitMQ, "redis-server": ofRedis}

// unmeasured are the shares where the system does not tell.
func unmeasured() (u shares) {
	for i := range u {
		u[i] = math.NaN()
	}
	return u
}

// share is what one user took of the stretches of a contender, as far as they were measured.
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

// observe begins a stretch, whose end notes the shares in b.used.
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

// processorTime is what each has used since the system or the process began.
type processorTime struct {
	by    [users]time.Duration // of ofOthers: nothing
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

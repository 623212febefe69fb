package main

import (
	"errors"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// watched are the kinds of servers whose processor time a stopwatch takes.
var watched = [...]testenv.Kind{testenv.Postgres, testenv.RabbitMQ, testenv.Redis}

// stopwatch measures a stretch of a run, which the run itself delimits.
type stopwatch struct {
	bench     *bench // whose private servers are watched, too; nil: none are
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

// sampleColumns are those of a sample: of some tables the first two.
var sampleColumns = []string{
	"operations/s",
	"client us each",
	"Postgres us",
	"RabbitMQ us",
	"Redis us",
	"busiest one %",
}

// sample is what n operations took. What no private server is there for is NaN. The last figure is the part that the busiest
// server has in the time of all servers of its kind.
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

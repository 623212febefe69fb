package testenv

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// clockTick is the unit of /proc/PID/stat, which Linux has fixed for programs.
const clockTick = 10 * time.Millisecond

// CPUTime returns the processor time, user and system, that the server has used since it started, of children
// that have ended too. It needs Linux. The clock ticks every 10 ms.
func (s *Server) CPUTime() (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil || s.proc.ended() {
		return 0, fmt.Errorf("testenv: processor time of %s: not running", s.kind)
	}
	return CPUTime(s.proc.pid)
}

// CPUTime returns the processor time, user and system, of a process and its descendants, of those that
// have ended and were waited for too.
func CPUTime(root int) (total time.Duration, err error) {
	err = eachCPUTime(root, func(_ int, _ string, used time.Duration) { total += used })
	return total, err
}

// CPUTimes returns the processor time of a process's descendants by the name of their command, as CPUTime
// counts it.
func CPUTimes(root int) (map[string]time.Duration, error) {
	times := map[string]time.Duration{}
	err := eachCPUTime(root, func(pid int, command string, used time.Duration) {
		if pid != root {
			times[command] += used
		}
	})
	return times, err
}

// MachineTimes returns the time of all processors of this machine since it started, and how much of that was idle.
// It needs Linux: see /proc/stat in proc(5).
func MachineTimes() (total, idle time.Duration, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, fmt.Errorf("testenv: processor time: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	// Behind "cpu": user, nice, system, idle, iowait, irq, softirq, steal. The guest times that follow are part of user and nice.
	const idling, iowait, steal = 4, 5, 8
	if len(fields) <= steal || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("testenv: /proc/stat begins with %q", line)
	}
	for i := 1; i <= steal; i++ {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("testenv: /proc/stat: %w", err)
		}
		total += time.Duration(n) * clockTick
		if i == idling || i == iowait {
			idle += time.Duration(n) * clockTick
		}
	}
	return total, idle, nil
}

func eachCPUTime(root int, fn func(pid int, command string, used time.Duration)) error {
	pids, err := tree(root)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		command, used, err := cpuTimeOf(pid)
		if pid != root && (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)) {
			continue // it ended meanwhile
		}
		if err != nil {
			return fmt.Errorf("testenv: processor time: %w", err)
		}
		fn(pid, command, used)
	}
	return nil
}

func cpuTimeOf(pid int) (command string, used time.Duration, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, err
	}
	// Behind "pid (command)" the fields begin with the third; 14 to 17 are utime, stime, cutime and cstime.
	const first, utime, cstime = 3, 14, 17
	text := string(stat)
	begin, end := strings.IndexByte(text, '(')+1, strings.LastIndexByte(text, ')')
	if begin < 1 || end < begin {
		return "", 0, fmt.Errorf("/proc/%d/stat is %q", pid, stat)
	}
	fields := strings.Fields(text[end+1:])
	if len(fields) <= cstime-first {
		return "", 0, fmt.Errorf("/proc/%d/stat is %q", pid, stat)
	}
	var ticks time.Duration
	for _, field := range fields[utime-first : cstime-first+1] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return "", 0, err
		}
		ticks += time.Duration(n)
	}
	return text[begin:end], ticks * clockTick, nil
}

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
func CPUTime(root int) (time.Duration, error) {
	pids, err := tree(root)
	if err != nil {
		return 0, err
	}
	var total time.Duration
	for i, pid := range pids {
		used, err := cpuTimeOf(pid)
		if i > 0 && (errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)) {
			continue // it ended meanwhile
		}
		if err != nil {
			return 0, fmt.Errorf("testenv: processor time: %w", err)
		}
		total += used
	}
	return total, nil
}

func cpuTimeOf(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// Behind "pid (name)" the fields begin with the third; 14 to 17 are utime, stime, cutime and cstime.
	const first, utime, cstime = 3, 14, 17
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) <= cstime-first {
		return 0, fmt.Errorf("/proc/%d/stat is %q", pid, stat)
	}
	var ticks time.Duration
	for _, field := range fields[utime-first : cstime-first+1] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += time.Duration(n)
	}
	return ticks * clockTick, nil
}

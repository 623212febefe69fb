package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a running child in its own process group.
type process struct {
	pid  int
	done chan struct{}
	err  error // from Wait, readable once done is closed
}

// startProcess starts cmd. If the system supports it, the child dies with this process. Linux ties a child to the thread
// that forked it, so the thread is kept until the child has ended. enter, if not nil, runs on that thread first.
func startProcess(cmd *exec.Cmd, enter func() error) (*process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	DieWithParent(cmd.SysProcAttr)

	p := &process{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var err error
		if enter == nil {
			defer runtime.UnlockOSThread()
		} else {
			err = enter() // the thread is now in another network, and ends with the goroutine
		}
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// verdict describes how the process ended.
func (p *process) verdict() string {
	if p.err == nil {
		return "exit status 0"
	}
	return p.err.Error()
}

// terminate asks the process to end. If it does not end in time, terminate kills its tree. It returns when the helpers are
// gone, too: the helpers of RabbitMQ live a moment longer.
func (p *process) terminate(sig syscall.Signal, patience time.Duration) error {
	if p.ended() {
		return nil
	}
	helpers, err := tree(p.pid)
	if err != nil {
		return err
	}
	if err := syscall.Kill(p.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-p.done:
		return waitGone(helpers, Patience)
	case <-time.After(patience): // timing: the caller passes Patience
		return p.kill()
	}
}

// kill kills the process and all its descendants, and returns when they are gone. Signalling the process group is not
// enough, because Postgres gives every backend its own session.
func (p *process) kill() error {
	if p.ended() {
		return nil
	}
	if err := EndTree(p.pid, syscall.SIGSTOP, 0); err != nil { // a stopped parent cannot fork
		return err
	}
	<-p.done
	return nil
}

// EndTree sends sig to a process and all its descendants and waits until they are gone. It kills those that are still there
// after patience.
func EndTree(root int, sig syscall.Signal, patience time.Duration) error {
	pids, err := signalTree(root, sig)
	if err != nil {
		return err
	}
	if patience > 0 && waitGone(pids, patience) == nil {
		return nil
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return waitGone(pids, Patience)
}

// signalTree sends sig to a process and then to its descendants, until it finds no new ones. It returns all their ids,
// parents before children.
func signalTree(root int, sig syscall.Signal) ([]int, error) {
	var signalled []int
	for {
		pids, err := tree(root)
		if err != nil {
			return nil, err
		}
		fresh := false
		for _, pid := range pids {
			if slices.Contains(signalled, pid) {
				continue
			}
			fresh = true
			signalled = append(signalled, pid)
			if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
				return nil, fmt.Errorf("testenv: signal %v to process %d: %w", sig, pid, err)
			}
		}
		if !fresh {
			return signalled, nil
		}
	}
}

// tree returns root and its living descendants, parents before children.
func tree(root int) ([]int, error) {
	parents, err := parentsOfAll()
	if err != nil {
		return nil, err
	}
	pids := []int{root}
	for i := 0; i < len(pids); i++ {
		for child, parent := range parents {
			if parent == pids[i] {
				pids = append(pids, child)
			}
		}
	}
	return pids, nil
}

func waitGone(pids []int, patience time.Duration) error {
	deadline := time.Now().Add(patience) // timing: the caller passes Patience
	for {
		parents, err := parentsOfAll()
		if err != nil {
			return err
		}
		left := slices.DeleteFunc(slices.Clone(pids), func(pid int) bool {
			_, alive := parents[pid]
			return !alive
		})
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("testenv: processes %v are still there after %v", left, patience)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// parentsOfAll maps every living process to its parent. Zombies do not count.
func parentsOfAll() (map[int]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil || len(entries) == 0 {
		return parentsFromPS()
	}
	parents := map[int]int{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + entry.Name() + "/stat")
		if err != nil {
			continue // it has just ended
		}
		// Format: "pid (name) state ppid …". The name may contain spaces and parentheses.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		addParent(parents, pid, fields)
	}
	return parents, nil
}

func parentsFromPS() (map[int]int, error) {
	out, err := exec.Command("ps", "-axo", "pid=,stat=,ppid=").Output()
	if err != nil {
		return nil, fmt.Errorf("testenv: list processes: %w", err)
	}
	parents := map[int]int{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue
		}
		if pid, err := strconv.Atoi(fields[0]); err == nil {
			addParent(parents, pid, fields[1:])
		}
	}
	return parents, nil
}

// addParent takes the fields state and parent of a process listing.
func addParent(parents map[int]int, pid int, fields []string) {
	if len(fields) < 2 || strings.HasPrefix(fields[0], "Z") {
		return
	}
	if parent, err := strconv.Atoi(fields[1]); err == nil {
		parents[pid] = parent
	}
}

// clockTick is the unit of /proc/PID/stat, which is fixed on Linux.
const clockTick = 10 * time.Millisecond

// CPUTime returns the processor time, user and system, that the server has used since it started. Ended children count. It
// needs Linux. The resolution is 10 ms.
func (s *Server) CPUTime() (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil || s.proc.ended() {
		return 0, fmt.Errorf("testenv: processor time of %s: not running", s.kind)
	}
	return CPUTime(s.proc.pid)
}

// CPUTime returns the processor time, user and system, of a process and its descendants. Descendants that have ended and
// were waited for count, too.
func CPUTime(root int) (total time.Duration, err error) {
	err = eachCPUTime(root, func(_ int, _ string, used time.Duration) { total += used })
	return total, err
}

// CPUTimes returns the processor time of a process's descendants by command name, counted like CPUTime.
func CPUTimes(root int) (map[string]time.Duration, error) {
	times := map[string]time.Duration{}
	err := eachCPUTime(root, func(pid int, command string, used time.Duration) {
		if pid != root {
			times[command] += used
		}
	})
	return times, err
}

// MachineTimes returns the time of all processors of this machine since it started, and the idle part of it. It needs Linux:
// see /proc/stat in proc(5).
func MachineTimes() (total, idle time.Duration, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, fmt.Errorf("testenv: processor time: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	// After "cpu" come user, nice, system, idle, iowait, irq, softirq, steal. The guest times after them are part of user
	// and nice.
	const idling, iowait, steal = 4, 5, 8
	if len(fields) <= steal || fields[0] != "cpu" {
		return 0, 0, fmt.Errorf("testenv: /proc/stat starts with %q", line)
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
			continue // it has just ended
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
	// After "pid (command)" comes field 3. Fields 14 to 17 are utime, stime, cutime and cstime.
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

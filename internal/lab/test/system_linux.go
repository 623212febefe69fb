package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// cpuTime returns the CPU time of a process and of its ended children; 0 if it cannot be read.
func cpuTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	const utime, cstime = 11, 14 // proc_pid_stat(5), counted from the state
	if len(fields) <= cstime {
		return 0
	}
	var ticks int
	for _, field := range fields[utime : cstime+1] {
		n, _ := strconv.Atoi(string(field))
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 on every Linux
}

const (
	tmpfs  = 0x01021994 // TMPFS_MAGIC of statfs(2)
	noExec = 0x8        // ST_NOEXEC of statfs(2)
	// room is the space left for the tests' servers, in bytes. They take less than half of it.
	room = 4 << 30
)

// inMemory returns the variables that put the temporary files of the tests into dir, if dir is in memory and
// has room: a slow or busy disk makes servers late. Files of a killed server survive there, as on a disk. The
// go command's own files stay where they were.
func inMemory(dir string) []string {
	var fs syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(dir, &fs) != nil {
		return nil
	}
	if fs.Type != tmpfs || fs.Flags&noExec != 0 || int64(fs.Bavail)*int64(fs.Bsize) < room || !sticky(dir) {
		return nil
	}
	env := []string{"TMPDIR=" + dir}
	if os.Getenv("GOTMPDIR") == "" {
		env = append(env, "GOTMPDIR="+os.TempDir())
	}
	return env
}

// sticky reports whether every user may have files in dir, which the servers' users need.
func sticky(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&os.ModeSticky != 0 && info.Mode().Perm() == 0o777
}

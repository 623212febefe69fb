package testenv

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

var (
	Reserve      = reserve
	LeakPatience = &leakPatience
)

// Dir returns the server's folder.
func Dir(s *Server) string { return s.dir }

// Pid returns the id of the server's first process.
func Pid(s *Server) int { return s.proc.pid }

// Alive reports whether a process is there and no zombie, which some systems leave behind.
func Alive(pid int) (bool, error) {
	parents, err := parentsOfAll()
	_, alive := parents[pid]
	return alive, err
}

// Processes returns the server's living processes, found by their command line or
// working folder instead of by kinship; RabbitMQ's port mapper is not one of them
// as long as the server is not closed.
func Processes(s *Server) []int {
	parents, err := parentsOfAll()
	if err != nil {
		panic(err)
	}
	var found []int
	for pid := range parents {
		proc := filepath.Join("/proc", strconv.Itoa(pid))
		cwd, _ := os.Readlink(filepath.Join(proc, "cwd"))
		name, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		mapper := !s.closed && strings.Contains(string(name), "epmd")
		if strings.HasPrefix(cwd, s.dir) && !mapper || strings.Contains(string(name), s.dir) {
			found = append(found, pid)
		}
	}
	return found
}

package testenv

var (
	Reserve      = reserve
	LeakPatience = &leakPatience
)

// Dir returns the server's folder.
func Dir(s *Server) string { return s.dir }

// Pid returns the id of the server's main process.
func Pid(s *Server) int { return s.proc.pid }

// Alive reports whether a process exists and is not a zombie. Some systems leave zombies behind.
func Alive(pid int) (bool, error) {
	parents, err := parentsOfAll()
	_, alive := parents[pid]
	return alive, err
}

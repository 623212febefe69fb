// Package check holds the one type in which every adapter reports what is
// missing or mis-set on its server.
package check

// Finding is one thing that an operator should mend.
type Finding struct {
	// Component names the package that looked, such as "outboxpgx".
	Component string
	// Problem says what is missing or mis-set.
	Problem string
	// Mend says how to put it right: a statement, a setting or a command.
	Mend string
}

// String is one line for a terminal.
func (f Finding) String() string {
	return f.Component + ": " + f.Problem + "; " + f.Mend
}

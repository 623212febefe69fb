package prove

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgfault"
	"github.com/holdfast-go/holdfast/txretry"
)

// rows are the results of the queries of a Proof.
type rows []result

// result is the result of one query. Its rows are sorted, because their order has no meaning.
type result struct {
	query   string
	columns []string
	values  [][]string // as text, row by row; <key> replaces the key of the schedule
}

// read runs the queries.
func (r *runner) read() (rows, error) {
	all := make(rows, len(r.Rows))
	for i, query := range r.Rows {
		var err error
		if all[i], err = r.ask(query); err != nil {
			return nil, fmt.Errorf("Proof.Rows[%d], %s: %w", i, query, err)
		}
	}
	return all, nil
}

func (r *runner) ask(query string) (result, error) {
	found := result{query: query}
	// The simple protocol returns every value as text.
	answer, err := r.Pool.Query(r.ctx, query, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return found, err
	}
	defer answer.Close()
	keyless := strings.NewReplacer(r.key.String(), "<key>", strings.ReplaceAll(r.key.String(), "-", ""), "<key>")
	for answer.Next() {
		var row []string
		for _, value := range answer.RawValues() {
			if value == nil {
				row = append(row, "NULL")
				continue
			}
			row = append(row, keyless.Replace(string(value)))
		}
		found.values = append(found.values, row)
	}
	for _, field := range answer.FieldDescriptions() {
		found.columns = append(found.columns, field.Name)
	}
	slices.SortFunc(found.values, slices.Compare)
	return found, answer.Err()
}

func (a rows) equal(b rows) bool {
	return slices.EqualFunc(a, b, func(a, b result) bool {
		return slices.EqualFunc(a.values, b.values, slices.Equal[[]string])
	})
}

// maxDifferences keeps a message readable.
const maxDifferences = 8

// differences lists the rows that only a has (+), and the rows that only b has (-).
func (a rows) differences(b rows) string {
	var text strings.Builder
	for i := range a {
		more, fewer := without(a[i], b[i]), without(b[i], a[i])
		if len(more)+len(fewer) == 0 {
			continue
		}
		fmt.Fprintf(&text, "\n    %s", a[i].query)
		lines := 0
		for _, row := range append(signed("-", fewer), signed("+", more)...) {
			if lines++; lines <= maxDifferences {
				fmt.Fprintf(&text, "\n      %s", row)
			}
		}
		if lines > maxDifferences {
			fmt.Fprintf(&text, "\n      and %d more", lines-maxDifferences)
		}
	}
	return text.String()
}

func signed(sign string, some []string) (lines []string) {
	for _, row := range some {
		lines = append(lines, sign+" "+row)
	}
	return lines
}

// without returns the rows that a has more often than b.
func without(a, b result) (some []string) {
	counts := map[string]int{}
	for _, row := range b.values {
		counts[b.text(row)]++
	}
	for _, row := range a.values {
		text := a.text(row)
		if counts[text]--; counts[text] < 0 {
			some = append(some, text)
		}
	}
	return some
}

func (a result) text(row []string) string {
	parts := make([]string, len(row))
	for i, value := range row {
		parts[i] = a.columns[i] + "=" + value
	}
	return strings.Join(parts, " ")
}

// changing returns the names of the columns whose values differ between two results with equally many
// rows.
func (a rows) changing(b rows) (names []string) {
	for i := range a {
		if len(a[i].values) != len(b[i].values) {
			continue
		}
		for column, name := range a[i].columns {
			if !slices.Equal(a[i].column(column), b[i].column(column)) {
				names = append(names, name)
			}
		}
	}
	return names
}

func (a result) column(i int) (values []string) {
	for _, row := range a.values {
		values = append(values, row[i])
	}
	slices.Sort(values)
	return values
}

// How to fix a failure, as far as the schedule shows.

const (
	fixUnchanged = "\n  Name the rows that the code writes. If the code skipped its work as done already, Reset must also delete the record of it, such as the entry in holdfast_inbox or the record in holdfast_idempotency."

	fixRepeated = "\n  The repetition did something although the work was done. That happened outside of the transaction that records it: on another connection, in middleware or in a Prepare step."

	fixSwallowed = "\n  A statement failed and the code returned nil: it swallowed the error. Return it."

	fixGivenUp = "\n  This fault passes by itself. Mark only errors that you know as unrecoverable, and return all others unchanged."

	fixAnswers = "\n  A repeated request gets the answer that was stored in the transaction. Put all of it into the Response that the function returns, and change nothing afterwards."

	fixAfter = "\n  Work after COMMIT, such as in AfterCommit, is lost with the process. Write it with tx, or write a message to an outbox with tx and do the work in the handler of that message."
)

func fixError(err error) string {
	switch {
	case errors.Is(err, txretry.ErrManaged):
		return "\n  The code ends its transaction itself. Return nil to commit and an error to roll back."
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fixSwallowed
	}
	return ""
}

func fixChanging(columns []string) string {
	which := "Some rows"
	if len(columns) > 0 {
		which = "The values of " + strings.Join(columns, ", ")
	}
	return "\n  " + which + " depend on the attempt: on time.Now, now(), a random id or a sequence. Take them from the message or the request; or, if they may differ, select the other columns in Proof.Rows. If rows are missing, Reset leaves a record that the work is done."
}

func fixEffects(more bool) string {
	if more {
		return "\n  Effects elsewhere happen again when the code runs again; a Prepare step runs for every delivery. Send an idempotency key to the other side, and count keys; or write a message to an outbox with tx, and do the work in the handler of that message."
	}
	return fixAfter
}

func fixFailed(fault pgfault.Fault) string {
	switch fault {
	case pgfault.Refuse:
		return "\n  The code swallowed the error, in a savepoint for example, and committed without the effect of the statement. Continue only after errors that you know, and return all others."
	case pgfault.Conflict:
		return "\n  The code ran twice in one process. Reset captured variables in every run, and write with tx only."
	}
	return "\n  The code ran twice in one process. Do not remember in memory that the work was done, write with tx only, and return the error of a statement."
}

// fixKilled is the fix for rows that a killed process left, before and after the work is repeated.
func (r *runner) fixKilled(fault pgfault.Fault, at place) string {
	last := r.lastCommit()
	if at.n > last || at.n == last && fault == pgfault.KillAfter {
		return fixAfter
	}
	return r.fixOutside()
}

// fixZombie is the fix for a process that continued after another one had done the work.
func (r *runner) fixZombie() string {
	if len(r.outside()) > 0 {
		return r.fixOutside()
	}
	return "\n  The code went on after its connection was lost, and wrote outside of its transaction. Return the error, and use tx for every statement."
}

// fixTwice is the fix for two processes that did the work at once.
func (r *runner) fixTwice() string {
	return "\n  Two processes did the work at once. Write with the tx that the code is given, and read in that transaction, too, before you decide." + r.ranOutside()
}

func (r *runner) fixOutside() string {
	return "\n  It wrote outside of its transaction. Use the tx that it is given for every statement, not a pool." + r.ranOutside()
}

func (r *runner) ranOutside() string {
	if outside := r.outside(); len(outside) > 0 {
		return fmt.Sprintf(" Outside a transaction: %s.", strings.Join(outside, "; "))
	}
	return ""
}

// outside returns the writes of the undisturbed run that were in no transaction.
func (r *runner) outside() (all []string) {
	for _, step := range r.steps {
		if !step.Outside {
			continue
		}
		for _, sql := range step.SQL {
			word, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(sql)), " ")
			switch word {
			case "insert", "update", "delete", "merge", "copy", "with", "truncate", "call":
				all = append(all, brief([]string{sql}))
			}
		}
	}
	return all
}

// lastCommit returns the number of the last step that ends in COMMIT.
func (r *runner) lastCommit() int {
	for n := len(r.steps); n > 0; n-- {
		if r.steps[n-1].Commit {
			return n
		}
	}
	return len(r.steps)
}

package prove

import (
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// rows are what the queries of a Proof returned.
type rows []result

// result is what one query returned, its rows sorted: their order says nothing.
type result struct {
	query   string
	columns []string
	values  [][]string // as text, row by row; the key of the schedule reads <key>
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
	// The simple protocol has every value as text.
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

// maxDifferences bounds a message for people.
const maxDifferences = 8

// differences tells what rows have that others have not (+), and the other way round (-).
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

// without returns the rows of a that b has not, or has less often.
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

// changing names the columns whose values differ between two results with as many rows.
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

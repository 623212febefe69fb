package pgcheck

import (
	"regexp"
	"strings"
)

// body is the function of a trigger, and the changes for which the trigger runs.
type body struct {
	language, source string
	writes, deletes  bool
}

var (
	// noise is what is not code: comments and texts.
	noise = regexp.MustCompile(`(?s)--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'`)
	// returned finds the expressions that a function in PL/pgSQL returns.
	returned = regexp.MustCompile(`(?is)\breturn\b\s*([^;]*?)\s*;`)
	// skips finds the words by which other languages drop a row.
	skips = regexp.MustCompile(`(?i)\b(skip|null|none)\b`)
)

// drops returns why the function may drop a change, or "".
//
// A row trigger drops the change of a row by returning NULL. NEW is NULL in a trigger for DELETE, and OLD is NULL in one
// for INSERT. A trigger for UPDATE that returns OLD undoes the change, and the row still counts as changed.
func (b body) drops() string {
	switch b.language {
	case "plpgsql":
		return b.dropsPLpgSQL()
	case "internal":
		if strings.TrimSpace(b.source) == "suppress_redundant_updates_trigger" {
			return "it drops an UPDATE that changes nothing"
		}
		return ""
	case "c":
		return ""
	}
	if word := skips.FindString(b.source); word != "" {
		return "its function contains " + word
	}
	return ""
}

func (b body) dropsPLpgSQL() string {
	var old, fresh bool
	for _, found := range returned.FindAllStringSubmatch(noise.ReplaceAllString(b.source, " "), -1) {
		switch expression := strings.ToLower(strings.Join(strings.Fields(found[1]), "")); strings.Trim(expression, "()") {
		case "new":
			fresh = true
		case "old":
			old = true
		case "coalesce(new,old", "coalesce(old,new":
			old, fresh = true, true
		default:
			return "its function may return " + found[1]
		}
	}
	switch {
	case b.writes && !fresh:
		return "its function does not return NEW"
	case b.deletes && !old:
		return "it runs for DELETE and its function does not return OLD"
	}
	return ""
}

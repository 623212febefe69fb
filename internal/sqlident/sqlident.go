// Package sqlident validates and quotes the SQL identifiers that come from
// configuration. Only plain names pass, so that no setting can carry SQL.
package sqlident

import (
	"errors"
	"fmt"
)

// ErrInvalid is inside every error of this package.
var ErrInvalid = errors.New("want a letter or underscore, then letters, digits or underscores, 63 at most")

// maxLength is PostgreSQL's NAMEDATALEN - 1; longer names are cut silently.
const maxLength = 63

// Check returns an error unless name is a plain identifier.
func Check(name string) error {
	if len(name) == 0 || len(name) > maxLength {
		return fmt.Errorf("identifier %.70q: %w", name, ErrInvalid)
	}
	for i := range len(name) {
		c := name[i]
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return fmt.Errorf("identifier %q: %w", name, ErrInvalid)
		}
	}
	return nil
}

// Quote returns name as a quoted identifier.
func Quote(name string) (string, error) {
	if err := Check(name); err != nil {
		return "", err
	}
	return `"` + name + `"`, nil
}

// Qualify returns "schema"."table", or "table" alone where schema is empty and
// the search path decides.
func Qualify(schema, table string) (string, error) {
	quoted, err := Quote(table)
	if err != nil || schema == "" {
		return quoted, err
	}
	prefix, err := Quote(schema)
	if err != nil {
		return "", err
	}
	return prefix + "." + quoted, nil
}

// Granted are privileges on things in a schema, and the right to reach them there. Without a schema it is
// the search path that decides, and whoever set that has granted it.
func Granted(schema string, privileges ...string) []string {
	quoted, err := Quote(schema)
	if schema == "" || err != nil {
		return privileges
	}
	return append([]string{`USAGE ON SCHEMA ` + quoted}, privileges...)
}

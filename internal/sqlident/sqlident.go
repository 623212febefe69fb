// Package sqlident validates and quotes SQL identifiers from configuration. It accepts plain names only,
// so that no setting can inject SQL.
package sqlident

import (
	"errors"
	"fmt"
)

// ErrInvalid is wrapped by every error of this package.
var ErrInvalid = errors.New("want a letter or underscore, then letters, digits or underscores, 63 at most")

// maxLength is PostgreSQL's NAMEDATALEN - 1. PostgreSQL truncates longer names silently.
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

// Qualify returns "schema"."table". With an empty schema it returns "table", and the search path decides.
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

// Granted returns privileges on things in a schema, plus USAGE on the schema. An empty schema adds
// nothing: the search path decides, and the person who set it has granted the right.
func Granted(schema string, privileges ...string) []string {
	quoted, err := Quote(schema)
	if schema == "" || err != nil {
		return privileges
	}
	return append([]string{`USAGE ON SCHEMA ` + quoted}, privileges...)
}

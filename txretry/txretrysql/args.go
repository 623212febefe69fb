package txretrysql

import (
	sqldriver "database/sql/driver"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// plainArgs returns arguments that every driver can pass: what database/sql does not know becomes its
// text, as Postgres reads it.
func plainArgs(args []any) ([]any, error) {
	var plain []any
	for i, arg := range args {
		if isPlain(arg) {
			continue
		}
		text, err := textOf(arg)
		if err != nil {
			return nil, fmt.Errorf("txretrysql: argument %d: %w", i+1, err)
		}
		if plain == nil {
			plain = slices.Clone(args) // the caller's stay as they are
		}
		plain[i] = text
	}
	if plain == nil {
		return args, nil
	}
	return plain, nil
}

func isPlain(arg any) bool {
	switch arg := arg.(type) {
	case nil, string, *string, bool, time.Time, *time.Time, sqldriver.Valuer:
		return true
	case []byte: // some drivers take nil for an empty one
		return arg != nil
	case time.Duration, *time.Duration: // an interval, and no number
		return false
	}
	switch kind := reflect.TypeOf(arg).Kind(); kind {
	case reflect.Slice:
		return reflect.TypeOf(arg).Elem().Kind() == reflect.Uint8
	case reflect.Array, reflect.Map, reflect.Struct:
		return false
	}
	return true
}

// textOf returns nil for what is NULL.
func textOf(arg any) (any, error) {
	types := pgtype.NewMap() // it serves one goroutine
	known, ok := types.TypeForValue(arg)
	if !ok {
		return nil, fmt.Errorf("%T has no form in SQL, convert it to text", arg)
	}
	text, err := types.Encode(known.OID, pgtype.TextFormatCode, arg, nil)
	if err != nil || text == nil {
		return nil, err
	}
	return string(text), nil
}

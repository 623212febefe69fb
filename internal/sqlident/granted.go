package sqlident

// Granted are privileges on things in a schema, and the right to reach them there. Without a schema it is
// the search path that decides, and whoever set that has granted it.
func Granted(schema string, privileges ...string) []string {
	quoted, err := Quote(schema)
	if schema == "" || err != nil {
		return privileges
	}
	return append([]string{`USAGE ON SCHEMA ` + quoted}, privileges...)
}

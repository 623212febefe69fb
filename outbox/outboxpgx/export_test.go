package outboxpgx

// Statement is the SQL of a statement on the default table.
func Statement(name string) string {
	t, err := SchemaConfig{}.tables()
	if err != nil {
		panic(err)
	}
	s := t.statements()
	return map[string]string{
		"setup": s.setup, "promote": s.promote, "lease": s.lease, "read": s.read, "prune": s.prune,
		"published": s.published, "kept": s.kept, "failed": s.failed, "dead": s.dead,
	}[name]
}

package outboxpgx

// Statement is the SQL of a statement on the default table.
func Statement(name string) string {
	t, err := SchemaConfig{}.tables()
	if err != nil {
		panic(err)
	}
	s := t.statements()
	return map[string]string{
		"plan": s.plan, "promote": s.promote, "lease": s.lease, "read": s.read, "published": s.published, "prune": s.prune,
	}[name]
}

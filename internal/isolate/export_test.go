package isolate

// Known is how many keys any part of the search remembers.
func (s *Search[K]) Known() int { return max(s.groups.len(), len(s.records), len(s.onTrial)) }

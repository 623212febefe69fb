package isolate

// Known is the largest number of keys that any part of the search remembers.
func (s *Search[K]) Known() int { return max(s.groups.len(), len(s.records), len(s.onTrial)) }

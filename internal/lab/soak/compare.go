package main

// rounds is how often what is compared takes turns: a busy machine makes both dearer for a while, and the median of the
// ratios within one round tells them from each other.
const rounds = 5

// compared are the costs of one operation on a small table and on a large one, round by round.
type compared struct{ small, large []cost }

// alternate measures both, one after the other, some times.
func alternate(small, large func() (cost, error)) (c compared, err error) {
	for range rounds {
		for _, side := range []struct {
			measure func() (cost, error)
			into    *[]cost
		}{{small, &c.small}, {large, &c.large}} {
			m, err := side.measure()
			if err != nil {
				return c, err
			}
			*side.into = append(*side.into, m)
		}
	}
	return c, nil
}

// total adds rounds up.
func total(costs []cost) (sum cost) {
	for _, c := range costs {
		sum.ops += c.ops
		sum.took += c.took
		sum.client += c.client
		sum.postgres += c.postgres
	}
	return sum
}

// ratio is how many times the processor time of Postgres the large table takes.
func (c compared) ratio() float64 {
	var ratios []float64
	for i, large := range c.large {
		ratios = append(ratios, large.postgresPerOp()/c.small[i].postgresPerOp())
	}
	return median(ratios)
}

// noDearer is how much more an operation may cost beside much data.
const noDearer = 1.5

// sameCost finds that the operation costs about the same.
func (r *report) sameCost(what string, c compared) {
	r.find(c.ratio() <= noDearer, "%s takes %.2f times the processor time of Postgres that it takes beside next to nothing (median of %d rounds): at most %.2f",
		what, c.ratio(), len(c.large), noDearer)
}

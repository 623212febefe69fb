package main

func ratelimitWorkload() workload {
	return workload{"ratelimit", []part{
		{"memory", benchRateMemory},
		{"redis", benchRateRedis(true)},
		{"denied", benchRateRedis(false)},
		{"cached", benchRateCached},
		{"leased", benchRateLeased},
	}}
}

// rateOurs is one limit, allowed where the table says so.
const rateOurs = "holdfast"

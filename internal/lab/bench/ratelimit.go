package main

func ratelimitWorkload() workload {
	return workload{"ratelimit", []part{
		{"memory", benchRateMemory},
		{"redis", benchRateRedis},
		{"leased", benchRateLeased},
	}}
}

// rateOurs is one limit, allowed where the table says so.
const rateOurs = "holdfast"

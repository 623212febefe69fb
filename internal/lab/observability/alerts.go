package main

// The severities: page wakes somebody, ticket waits for the morning.
const (
	page   = "page"
	ticket = "ticket"
)

// alert is one rule. Its summary may name labels as {{ $labels.job }}.
type alert struct {
	name, expr, lasting string // lasting: for how long before it fires
	severity            string
	summary             string
	description         string
	examples            []example
}

// example is a case of promtool: series that a service reports, and what the alert says of them.
type example struct {
	name   string
	series []series
	at     string
	// fires are the labels of the alerts, without severity; nil where it must stay silent.
	fires []labels
}

type labels map[string]string

// series is one in promtool's notation, such as {`x{a="b"}`, "0+1x10"}: a value a minute.
type series struct{ name, values string }

// rareEvent is about a counter of what ought not to happen. A counter that begins with its first event has no
// increase, so the birth of its series counts, too.
func rareEvent(by, counter, window string) string {
	return `sum by (` + by + `) (increase(` + counter + `[` + window + `])) > 0 or sum by (` + by + `) (` +
		counter + ` unless ` + counter + ` offset ` + window + `) > 0`
}

// gone is about what has reported within a day and does no more, by labels that outlive a process.
func gone(by, gauge string) string {
	return `count by (` + by + `) (last_over_time(` + gauge + `[1d])) unless on (` + by + `) count by (` + by + `) (` + gauge + `)`
}

// alerts are the rules, the most frequent parts first.
var alerts = []alert{
	{
		name: "HoldfastTargetDown", lasting: "2m", severity: ticket,
		expr:    `up == 0 and on (job) count by (job) (last_over_time(` + anyMetric + `[1d]))`,
		summary: "{{ $labels.job }} on {{ $labels.instance }} is not reached",
		description: "Prometheus cannot scrape a process of a service that has reported metrics of Holdfast within a day. " +
			"What it would alert on is not seen.",
		examples: []example{
			{
				"a process of the shop does not answer",
				[]series{
					{`up{job="shop",instance="a"}`, "1x20"},
					{`up{job="shop",instance="b"}`, "1x5 0x14"},
					{`holdfast_txretry_attempts_total{job="shop",instance="a",operation="order"}`, "0+1x20"},
				},
				"10m",
				[]labels{{"job": "shop", "instance": "b"}},
			},
			{
				"somebody else's process does not answer",
				[]series{
					{`up{job="other",instance="b"}`, "0x20"},
					{`up{job="shop",instance="a"}`, "1x20"},
					{`holdfast_txretry_attempts_total{job="shop",instance="a",operation="order"}`, "0+1x20"},
				},
				"10m", nil,
			},
		},
	},
	{
		name: "HoldfastRelayAbsent", lasting: "5m", severity: page,
		expr:    gone("job", `holdfast_outbox_oldest_age_seconds`),
		summary: "No relay of {{ $labels.job }} reports",
		description: "A relay has reported the age of the oldest message within a day, and none does now: no relay runs, it cannot ask " +
			"its store, or Prometheus does not scrape it. Messages may wait unseen.",
		examples: []example{
			{
				"the only relay of one of two services has ended",
				[]series{
					{`holdfast_outbox_oldest_age_seconds{job="shop"}`, "0x5 stale"},
					{`holdfast_outbox_oldest_age_seconds{job="other"}`, "0x20"},
				},
				"15m",
				[]labels{{"job": "shop"}},
			},
			{
				"one of two relays has ended",
				[]series{
					{`holdfast_outbox_oldest_age_seconds{job="shop",instance="a"}`, "0x5 stale"},
					{`holdfast_outbox_oldest_age_seconds{job="shop",instance="b"}`, "0x20"},
				},
				"15m", nil,
			},
		},
	},
	{
		name: "HoldfastConsumerAbsent", lasting: "5m", severity: page,
		expr:    gone("job, queue", `{__name__=~"holdfast_inbox_.+_in_hand"}`),
		summary: "No consumer of {{ $labels.job }} for {{ $labels.queue }} reports",
		description: "A consumer has reported within a day, and none does now: none runs, or Prometheus does not scrape it. " +
			"Messages wait at the broker.",
		examples: []example{
			{
				"the consumers of one queue have ended",
				[]series{
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders"}`, "0x5 stale"},
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="refunds"}`, "0x20"},
				},
				"15m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"a consumer was replaced",
				[]series{
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders",instance="a"}`, "0x5 stale"},
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders",instance="b"}`, "_x7 0x13"},
				},
				"15m", nil,
			},
		},
	},
	{
		name: "HoldfastSweeperAbsent", lasting: "5m", severity: page,
		expr:    gone("job, holdfast_sweeper", `holdfast_expiry_next_seconds`),
		summary: "No sweeper {{ $labels.holdfast_sweeper }} of {{ $labels.job }} reports",
		description: "A sweeper has reported within a day, and none does now: none runs, or Prometheus does not scrape it. " +
			"Rows that fall due are not expired, and nobody measures it.",
		examples: []example{
			{
				"the sweeper has ended",
				[]series{{`holdfast_expiry_next_seconds{job="shop",holdfast_sweeper="holds"}`, "1000x5 stale"}},
				"15m",
				[]labels{{"job": "shop", "holdfast_sweeper": "holds"}},
			},
			{
				"a sweeper that waits for its next time",
				[]series{{`holdfast_expiry_next_seconds{job="shop",holdfast_sweeper="holds"}`, "1000x20"}},
				"15m", nil,
			},
		},
	},
	{
		name: "HoldfastOutboxLagHigh", lasting: "2m", severity: ticket,
		expr:    `max by (job) (holdfast_outbox_oldest_age_seconds) > 60`,
		summary: "A message of {{ $labels.job }} has waited for more than a minute",
		description: "The oldest message in the outbox was stored more than a minute ago and is not published. " +
			"The value is its age in seconds.",
		examples: []example{
			{
				"a message waits",
				[]series{{`holdfast_outbox_oldest_age_seconds{job="shop",instance="a"}`, "0x5 60+60x10"}},
				"10m",
				[]labels{{"job": "shop"}},
			},
			{
				"a burst that is gone within a minute",
				[]series{{`holdfast_outbox_oldest_age_seconds{job="shop",instance="a"}`, "0 45 90 0 0 0 45 90 0 0 0"}},
				"7m", nil,
			},
		},
	},
	{
		name: "HoldfastOutboxNotDraining", lasting: "5m", severity: page,
		expr: `(deriv(max by (job) (holdfast_outbox_oldest_age_seconds)[5m:1m]) > 0.9 and on (job) max by (job) (holdfast_outbox_oldest_age_seconds) > 60) ` +
			`unless on (job) sum by (job) (rate(holdfast_outbox_published_total[5m])) > 0`,
		summary: "{{ $labels.job }} publishes nothing, and its oldest message gets older",
		description: "The age of the oldest message grows with the clock, and no message was confirmed for five minutes: " +
			"the relay or its broker stands still.",
		examples: []example{
			{
				"the relay stands still",
				[]series{
					{`holdfast_outbox_oldest_age_seconds{job="shop"}`, "0+60x30"},
					{`holdfast_outbox_published_total{job="shop"}`, "100x30"},
				},
				"20m",
				[]labels{{"job": "shop"}},
			},
			{
				"nothing was ever published",
				[]series{{`holdfast_outbox_oldest_age_seconds{job="shop"}`, "0+60x30"}},
				"20m",
				[]labels{{"job": "shop"}},
			},
			{
				"one message waits for its next attempt while the others leave",
				[]series{
					{`holdfast_outbox_oldest_age_seconds{job="shop"}`, "0+60x30"},
					{`holdfast_outbox_published_total{job="shop"}`, "0+100x30"},
				},
				"20m", nil,
			},
		},
	},
	{
		name: "HoldfastTransportPaused", lasting: "1m", severity: page,
		expr:    `max by (job, transport) (holdfast_outbox_transport_state{state=~"paused|probing"}) > 0`,
		summary: "{{ $labels.job }} does not publish through {{ $labels.transport }}",
		description: "The breaker of a transport is open: the broker does not confirm. Messages wait in the outbox, " +
			"and none of them loses an attempt.",
		examples: []example{
			{
				"the broker is away, and is probed now and then",
				[]series{
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="closed"}`, "1x3 0x10"},
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="paused"}`, "0x3 1 1 0 1 1 1 1"},
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="probing"}`, "0x3 0 0 1 0 0 0 0"},
				},
				"8m",
				[]labels{{"job": "shop", "transport": "default"}},
			},
			{
				"the broker is there",
				[]series{
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="closed"}`, "1x10"},
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="paused"}`, "0x10"},
					{`holdfast_outbox_transport_state{job="shop",transport="default",state="probing"}`, "0x10"},
				},
				"8m", nil,
			},
		},
	},
	{
		name: "HoldfastOutboxDeadLetters", lasting: "1m", severity: ticket,
		expr:        `max by (job) (holdfast_outbox_depth{state="dead"}) > 0`,
		summary:     "{{ $labels.job }} has messages that could not be published",
		description: "Dead letters of the outbox wait for an operator. The value is their number, counted up to 100,000.",
		examples: []example{
			{
				"a dead letter",
				[]series{{`holdfast_outbox_depth{job="shop",state="dead"}`, "0x3 1x10"}},
				"8m",
				[]labels{{"job": "shop"}},
			},
			{
				"messages that are ready or parked",
				[]series{
					{`holdfast_outbox_depth{job="shop",state="ready"}`, "500x10"},
					{`holdfast_outbox_depth{job="shop",state="parked"}`, "3x10"},
					{`holdfast_outbox_depth{job="shop",state="dead"}`, "0x10"},
				},
				"8m", nil,
			},
		},
	},
	{
		name: "HoldfastInboxDeadLetters", lasting: "1m", severity: ticket,
		expr:        `max by (job, queue, class) ({__name__=~"holdfast_inbox_.+_dead_letters"}) > 0`,
		summary:     "{{ $labels.job }} has given up messages of {{ $labels.queue }}, class {{ $labels.class }}",
		description: "Dead letters of a consumer wait for an operator. The value is their number.",
		examples: []example{
			{
				"dead letters, which two processes count",
				[]series{
					{`holdfast_inbox_amqp_dead_letters{job="shop",instance="a",queue="orders",class="validation"}`, "0x3 2x10"},
					{`holdfast_inbox_amqp_dead_letters{job="shop",instance="b",queue="orders",class="validation"}`, "0x3 2x10"},
				},
				"8m",
				[]labels{{"job": "shop", "queue": "orders", "class": "validation"}},
			},
			{
				"none",
				[]series{{`holdfast_inbox_redis_dead_letters{job="shop",queue="orders",class="validation"}`, "0x10"}},
				"8m", nil,
			},
		},
	},
	{
		name: "HoldfastConsumerStalled", lasting: "5m", severity: page,
		expr: `sum by (job, queue) ({__name__=~"holdfast_inbox_.+_in_hand"}) > sum by (job, queue) ({__name__=~"holdfast_inbox_.+_held"}) ` +
			`unless on (job, queue) sum by (job, queue) (rate({__name__=~"holdfast_inbox_.+_settled_total"}[5m])) > 0`,
		summary: "{{ $labels.job }} settles no message of {{ $labels.queue }}",
		description: "Consumers have messages in hand that do not wait for a retry, and none was settled for five minutes. " +
			"The value is how many they have.",
		examples: []example{
			{
				"handlers hang",
				[]series{
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders"}`, "0x3 8x20"},
					{`holdfast_inbox_amqp_held{job="shop",queue="orders"}`, "0x23"},
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="acked"}`, "0 50 100 150x20"},
				},
				"20m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"messages wait for their retries alone",
				[]series{
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders"}`, "2x23"},
					{`holdfast_inbox_amqp_held{job="shop",queue="orders"}`, "2x23"},
				},
				"20m", nil,
			},
			{
				"a busy consumer",
				[]series{
					{`holdfast_inbox_amqp_in_hand{job="shop",queue="orders"}`, "8x23"},
					{`holdfast_inbox_amqp_held{job="shop",queue="orders"}`, "0x23"},
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="acked"}`, "0+50x23"},
				},
				"20m", nil,
			},
		},
	},
	{
		name: "HoldfastConsumerDisconnected", lasting: "5m", severity: page,
		expr:        `sum by (job, queue) (increase({__name__=~"holdfast_inbox_.+_lost_sessions_total"}[5m])) > 3`,
		summary:     "{{ $labels.job }} cannot hold its session for {{ $labels.queue }}",
		description: "Sessions of a consumer with its broker fail, or cannot be opened, again and again. Messages wait at the broker.",
		examples: []example{
			{
				"the broker is away",
				[]series{{`holdfast_inbox_amqp_lost_sessions_total{job="shop",queue="orders"}`, "0+6x20"}},
				"15m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"the broker was restarted",
				[]series{{`holdfast_inbox_amqp_lost_sessions_total{job="shop",queue="orders"}`, "0x5 2x15"}},
				"15m", nil,
			},
		},
	},
	{
		name: "HoldfastConsumerRetriesHigh", lasting: "10m", severity: ticket,
		expr: `sum by (job, queue) (rate({__name__=~"holdfast_inbox_.+_settled_total",outcome="retried"}[10m])) ` +
			`/ sum by (job, queue) (rate({__name__=~"holdfast_inbox_.+_settled_total"}[10m])) > 0.2`,
		summary:     "Consumers of {{ $labels.job }} for {{ $labels.queue }} fail more than one delivery in five",
		description: "The value is the share of deliveries that are put off for a retry. Those that use up their attempts become dead letters.",
		examples: []example{
			{
				"one in three fails",
				[]series{
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="acked"}`, "0+20x40"},
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="retried",class="default"}`, "0+10x40"},
				},
				"30m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"one in ten fails",
				[]series{
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="acked"}`, "0+90x40"},
					{`holdfast_inbox_amqp_settled_total{job="shop",queue="orders",outcome="retried",class="default"}`, "0+10x40"},
				},
				"30m", nil,
			},
		},
	},
	{
		name: "HoldfastHandlerStuck", lasting: "0m", severity: ticket,
		expr:        rareEvent("job, queue", `{__name__=~"holdfast_inbox_.+_stuck_total"}`, "15m"),
		summary:     "A handler of {{ $labels.job }} for {{ $labels.queue }} did not return in time",
		description: "A handler ignored the end of its context. It occupies one of the consumer's places until the process ends.",
		examples: []example{
			{
				"the first one",
				[]series{{`holdfast_inbox_amqp_stuck_total{job="shop",queue="orders"}`, "_x5 1x20"}},
				"10m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"another one",
				[]series{{`holdfast_inbox_amqp_stuck_total{job="shop",queue="orders"}`, "1x30 2x10"}},
				"35m",
				[]labels{{"job": "shop", "queue": "orders"}},
			},
			{
				"one that was long ago",
				[]series{{`holdfast_inbox_amqp_stuck_total{job="shop",queue="orders"}`, "1x60"}},
				"50m", nil,
			},
		},
	},
	{
		name: "HoldfastTransactionRetriesHigh", lasting: "10m", severity: ticket,
		expr: `sum by (job, operation) (rate(holdfast_txretry_attempts_total[10m])) ` +
			`/ sum by (job, operation) (rate(holdfast_txretry_duration_seconds_count[10m])) > 1.5`,
		summary:     "Transactions {{ $labels.operation }} of {{ $labels.job }} are tried again and again",
		description: "The value is the average of attempts per transaction. Conflicts cost their work twice and may exhaust the attempts.",
		examples: []example{
			{
				"two attempts for each",
				[]series{
					{`holdfast_txretry_attempts_total{job="shop",operation="order",outcome="committed"}`, "0+200x40"},
					{`holdfast_txretry_duration_seconds_count{job="shop",operation="order",outcome="committed"}`, "0+100x40"},
				},
				"30m",
				[]labels{{"job": "shop", "operation": "order"}},
			},
			{
				"one in ten is tried twice",
				[]series{
					{`holdfast_txretry_attempts_total{job="shop",operation="order",outcome="committed"}`, "0+110x40"},
					{`holdfast_txretry_duration_seconds_count{job="shop",operation="order",outcome="committed"}`, "0+100x40"},
				},
				"30m", nil,
			},
		},
	},
	{
		name: "HoldfastCommitUnknown", lasting: "0m", severity: ticket,
		expr:        rareEvent("job, operation", `holdfast_txretry_duration_seconds_count{outcome="unknown"}`, "15m"),
		summary:     "{{ $labels.job }} does not know whether a transaction {{ $labels.operation }} was committed",
		description: "The reply to COMMIT was lost and nothing told what became of it. The caller got an error that says so.",
		examples: []example{
			{
				"the first one",
				[]series{{`holdfast_txretry_duration_seconds_count{job="shop",operation="order",outcome="unknown"}`, "_x5 1x20"}},
				"10m",
				[]labels{{"job": "shop", "operation": "order"}},
			},
			{
				"commits and rollbacks",
				[]series{
					{`holdfast_txretry_duration_seconds_count{job="shop",operation="order",outcome="committed"}`, "0+100x20"},
					{`holdfast_txretry_duration_seconds_count{job="shop",operation="order",outcome="rolled back"}`, "_x5 1+1x15"},
				},
				"10m", nil,
			},
		},
	},
	{
		name: "HoldfastSweepLate", lasting: "5m", severity: page,
		expr: `max by (job, holdfast_sweeper) (holdfast_expiry_overdue_age_seconds) > 300 ` +
			`or time() - max by (job, holdfast_sweeper) (holdfast_expiry_next_seconds) > 300`,
		summary: "{{ $labels.holdfast_sweeper }} of {{ $labels.job }} does not expire what is overdue",
		description: "The longest overdue row was due more than five minutes ago at the sweeper's last look, or the sweeper meant to look five " +
			"minutes ago and has not. The value is by how many seconds.",
		examples: []example{
			{
				"nobody sweeps",
				[]series{{`holdfast_expiry_overdue_age_seconds{job="shop",holdfast_sweeper="holds"}`, "0+60x30"}},
				"20m",
				[]labels{{"job": "shop", "holdfast_sweeper": "holds"}},
			},
			{
				"the sweeper gets no answer of its store since the fifth minute",
				[]series{
					{`holdfast_expiry_overdue_age_seconds{job="shop",holdfast_sweeper="holds"}`, "0x30"},
					{`holdfast_expiry_next_seconds{job="shop",holdfast_sweeper="holds"}`, "60+60x5 360x24"},
				},
				"20m",
				[]labels{{"job": "shop", "holdfast_sweeper": "holds"}},
			},
			{
				"a sweep a minute",
				[]series{
					{`holdfast_expiry_overdue_age_seconds{job="shop",holdfast_sweeper="holds"}`, "59x30"},
					{`holdfast_expiry_next_seconds{job="shop",holdfast_sweeper="holds"}`, "60+60x30"},
				},
				"20m", nil,
			},
		},
	},
	{
		name: "HoldfastSweepQuarantine", lasting: "0m", severity: ticket,
		expr:        rareEvent("job, holdfast_sweeper", `holdfast_expiry_poisoned_total`, "1h"),
		summary:     "{{ $labels.holdfast_sweeper }} of {{ $labels.job }} put rows in quarantine",
		description: "Rows made their batch fail, and are left alone for a while, then tried again one by one. The log names them.",
		examples: []example{
			{
				"a row that cannot be expired",
				[]series{{`holdfast_expiry_poisoned_total{job="shop",holdfast_sweeper="holds"}`, "0x5 1x20"}},
				"10m",
				[]labels{{"job": "shop", "holdfast_sweeper": "holds"}},
			},
			{
				"none, since long",
				[]series{{`holdfast_expiry_poisoned_total{job="shop",holdfast_sweeper="holds"}`, "0x200"}},
				"180m", nil,
			},
		},
	},
	{
		name: "HoldfastLimiterFallback", lasting: "1m", severity: ticket,
		expr:    `sum by (job, source) (rate(holdfast_ratelimit_decisions_total{source=~"fallback|none"}[5m])) > 0`,
		summary: "Redis does not decide the rate limits of {{ $labels.job }} (source {{ $labels.source }})",
		description: "Redis could not be asked. Source fallback: requests pass uncounted or are counted in each process. " +
			"Source none: they are refused.",
		examples: []example{
			{
				"Redis is away",
				[]series{{`holdfast_ratelimit_decisions_total{job="shop",limit="user",outcome="allowed",source="fallback"}`, "0x3 10+10x20"}},
				"10m",
				[]labels{{"job": "shop", "source": "fallback"}},
			},
			{
				"Redis and the remembered denials decide",
				[]series{
					{`holdfast_ratelimit_decisions_total{job="shop",limit="user",outcome="allowed",source="store"}`, "0+10x20"},
					{`holdfast_ratelimit_decisions_total{job="shop",limit="user",outcome="denied",source="cache"}`, "0+10x20"},
				},
				"10m", nil,
			},
		},
	},
	{
		name: "HoldfastIdempotencyStoreDown", lasting: "1m", severity: page,
		expr: `sum by (job) (rate(holdfast_idempotency_requests_total{result="store_unavailable"}[5m])) > 0 ` +
			`or sum by (job) (rate(holdfast_idempotency_fallbacks_total[5m])) > 0`,
		summary: "{{ $labels.job }} cannot ask its store of idempotency keys",
		description: "Requests are refused because their key could not be looked up, or what stands behind the store decides alone. " +
			"The value is how many a second.",
		examples: []example{
			{
				"requests are refused",
				[]series{{`holdfast_idempotency_requests_total{job="shop",result="store_unavailable"}`, "0x3 5+5x20"}},
				"10m",
				[]labels{{"job": "shop"}},
			},
			{
				"Postgres decides without Redis",
				[]series{{`holdfast_idempotency_fallbacks_total{job="shop"}`, "0x3 5+5x20"}},
				"10m",
				[]labels{{"job": "shop"}},
			},
			{
				"requests that are answered",
				[]series{
					{`holdfast_idempotency_requests_total{job="shop",result="completed"}`, "0+50x20"},
					{`holdfast_idempotency_requests_total{job="shop",result="replayed"}`, "0+5x20"},
				},
				"10m", nil,
			},
		},
	},
	{
		name: "HoldfastIdempotencyOutcomeUnknown", lasting: "0m", severity: ticket,
		expr:    rareEvent("job, result", `holdfast_idempotency_requests_total{result=~"persist_failed|lease_lost"}`, "15m"),
		summary: "{{ $labels.job }} ran a request whose result was not kept ({{ $labels.result }})",
		description: "A handler ran, and its response could not be stored under its key: a repetition of the request " +
			"may take effect again where the handler's own writes do not prevent it.",
		examples: []example{
			{
				"the first one",
				[]series{{`holdfast_idempotency_requests_total{job="shop",result="persist_failed"}`, "_x5 1x20"}},
				"10m",
				[]labels{{"job": "shop", "result": "persist_failed"}},
			},
			{
				"refusals",
				[]series{{`holdfast_idempotency_requests_total{job="shop",result="in_use"}`, "_x5 1+1x20"}},
				"10m", nil,
			},
		},
	},
}

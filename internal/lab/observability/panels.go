package main

// anyMetric selects what at least one process of every service reports.
const anyMetric = `{__name__=~"holdfast_(txretry_attempts_total|outbox_oldest_age_seconds|inbox_.+_in_hand|expiry_next_seconds|` +
	`idempotency_requests_total|ratelimit_requests_total|ratelimit_decisions_total)"}`

// rows are the dashboard. The consumers of RabbitMQ, Redis Streams and memory have metrics of their own, which differ
// in their prefix only, so that one expression reads all.
var rows = []row{
	{"Processes", []panel{
		{"Up", "1 for a process that Prometheus reaches.", "short", []query{
			{expr: `up{$s}`, legend: "{{job}} {{instance}}"},
		}},
		{"Memory", "Resident memory.", "bytes", []query{
			{expr: `process_resident_memory_bytes{$s}`, legend: "{{instance}}"},
		}},
		{"Goroutines", "", "short", []query{
			{expr: `go_goroutines{$s}`, legend: "{{instance}}"},
		}},
	}},
	{"Transactions (txretry)", []panel{
		{"Transactions", "Ended transactions by operation and outcome.", "ops", []query{
			{expr: `sum by (operation, outcome) (rate(holdfast_txretry_duration_seconds_count{$s}[$r]))`, legend: "{{operation}} {{outcome}}"},
		}},
		{"Attempts per transaction", "1 is a service without conflicts.", "short", []query{
			{
				expr:   `sum by (operation) (rate(holdfast_txretry_attempts_total{$s}[$r])) / sum by (operation) (rate(holdfast_txretry_duration_seconds_count{$s}[$r]))`,
				legend: "{{operation}}",
			},
		}},
		{"Failed attempts by SQLSTATE", "40001 and 40P01 are conflicts; 53200 is a full table of locks; 08… is a lost connection.", "ops", []query{
			{expr: `sum by (operation, phase, sqlstate) (rate(holdfast_txretry_failures_total{$s}[$r]))`, legend: "{{operation}} {{phase}} {{sqlstate}}", rare: true},
		}},
		{"Duration, 99th percentile", "Retries and their delays included.", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (operation, le) (rate(holdfast_txretry_duration_seconds_bucket{$s}[$r])))`, legend: "{{operation}}"},
		}},
		{"Time by phase", "Seconds spent in a phase per second. Much of acquire is a pool that is too small, or connections that are not given back.", "short", []query{
			{expr: `sum by (phase) (rate(holdfast_txretry_phase_duration_seconds_sum{$s}[$r]))`, legend: "{{phase}}"},
		}},
	}},
	{"Outbox and relay", []panel{
		{"Published", "Messages confirmed by their transport.", "ops", []query{
			{expr: `sum by (job) (rate(holdfast_outbox_published_total{$s}[$r]))`, legend: "{{job}}"},
		}},
		{"Lag", "From the storing of a message to its confirm.", "s", []query{
			{expr: `histogram_quantile(0.5, sum by (transport, le) (rate(holdfast_outbox_lag_seconds_bucket{$s}[$r])))`, legend: "median {{transport}}"},
			{expr: `histogram_quantile(0.99, sum by (transport, le) (rate(holdfast_outbox_lag_seconds_bucket{$s}[$r])))`, legend: "99 % {{transport}}"},
		}},
		{"Oldest message", "Age of the oldest message that is ready or waits after a failure.", "s", []query{
			{expr: `max by (job) (holdfast_outbox_oldest_age_seconds{$s})`, legend: "{{job}}"},
		}},
		{"Depth", "Messages in the store by state, counted up to 100,000.", "short", []query{
			{expr: `max by (job, state) (holdfast_outbox_depth{$s})`, legend: "{{job}} {{state}}"},
		}},
		{"Failed attempts by class", "dead=true: the message is a dead letter now.", "ops", []query{
			{expr: `sum by (class, dead) (rate(holdfast_outbox_failed_total{$s}[$r]))`, legend: "{{class}} dead={{dead}}", rare: true},
		}},
		{"Transport", "1 for the state that the breaker of a transport is in. Paused: the broker is away.", "short", []query{
			{expr: `max by (instance, transport, state) (holdfast_outbox_transport_state{$s})`, legend: "{{instance}} {{transport}} {{state}}"},
		}},
		{"Confirm, 99th percentile", "From giving a message to its transport to the confirm, the wait for room in the window included.", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (transport, le) (rate(holdfast_outbox_confirm_duration_seconds_bucket{$s}[$r])))`, legend: "{{transport}}"},
		}},
		{"Window", "Messages that await their confirm, as a part of how many may.", "percentunit", []query{
			{expr: `max by (instance, transport) (holdfast_outbox_window_fill_ratio{$s})`, legend: "{{instance}} {{transport}}", servers: true},
		}},
		{"Lanes given back and lost", "Messages of claimed lanes that were given back untouched, and leases of lanes that ran out before they were settled (should stay 0).", "ops", []query{
			{expr: `sum by (job) (rate(holdfast_outbox_given_back_total{$s}[$r]))`, legend: "{{job}} given back", rare: true},
			{expr: `sum by (job) (rate(holdfast_outbox_stale_leases_total{$s}[$r]))`, legend: "{{job}} stale leases", rare: true},
		}},
	}},
	{"Consumers (inbox)", []panel{
		{"Settled", "Deliveries by the way they were settled; stale ones come again.", "ops", []query{
			{expr: `sum by (queue, outcome) (rate({__name__=~"holdfast_inbox_.+_settled_total",$s}[$r]))`, legend: "{{queue}} {{outcome}}"},
		}},
		{"Handled", "Deliveries that reached a handler's transaction. A duplicate took no effect.", "ops", []query{
			{expr: `sum by (consumer, name, outcome) (rate(holdfast_inbox_messages_total{$s}[$r]))`, legend: "{{consumer}} {{name}} {{outcome}}"},
		}},
		{"Failures by class", "Retried deliveries and new dead letters.", "ops", []query{
			{expr: `sum by (queue, outcome, class) (rate({__name__=~"holdfast_inbox_.+_settled_total",outcome=~"retried|dead",$s}[$r]))`, legend: "{{queue}} {{outcome}} {{class}}", rare: true},
		}},
		{"Handler time, 99th percentile", "Of one attempt at a message or a batch: handlers, their transaction and what waits before them.", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (queue, le) (rate({__name__=~"holdfast_inbox_.+_process_duration_seconds_bucket",$s}[$r])))`, legend: "{{queue}}"},
		}},
		{"In hand", "Messages that were received and are not settled; held ones wait for a retry or for a place to go.", "short", []query{
			{expr: `sum by (queue) ({__name__=~"holdfast_inbox_.+_in_hand",$s})`, legend: "{{queue}} in hand"},
			{expr: `sum by (queue) ({__name__=~"holdfast_inbox_.+_held",$s})`, legend: "{{queue}} held"},
		}},
		{"Dead letters", "By class, counted about once a minute.", "short", []query{
			{expr: `max by (queue, class) ({__name__=~"holdfast_inbox_.+_dead_letters",$s})`, legend: "{{queue}} {{class}}", rare: true},
		}},
		{"Parked", "Ordering keys that wait for their dead letters, and messages that wait with them.", "short", []query{
			{expr: `max by (queue) ({__name__=~"holdfast_inbox_.+_parked_keys",$s})`, legend: "{{queue}} keys", rare: true},
			{expr: `max by (queue) ({__name__=~"holdfast_inbox_.+_parked_messages",$s})`, legend: "{{queue}} messages", rare: true},
		}},
		{"Trouble", "Sessions with the broker that failed or could not be opened, and handlers that did not return in time.", "ops", []query{
			{expr: `sum by (queue) (rate({__name__=~"holdfast_inbox_.+_lost_sessions_total",$s}[$r]))`, legend: "{{queue}} lost sessions", rare: true},
			{expr: `sum by (queue) (rate({__name__=~"holdfast_inbox_.+_stuck_total",$s}[$r]))`, legend: "{{queue}} stuck handlers", rare: true},
		}},
	}},
	{"Idempotency", []panel{
		{"Requests by result", "Requests that need an idempotency key.", "reqps", []query{
			{expr: `sum by (result) (rate(holdfast_idempotency_requests_total{$s}[$r]))`, legend: "{{result}}"},
		}},
		{"Duration, 99th percentile", "", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (result, le) (rate(holdfast_idempotency_duration_seconds_bucket{$s}[$r])))`, legend: "{{result}}"},
		}},
		{"Running, and decided without the store", "Handlers that run under an acquired key; requests whose store could not be asked.", "short", []query{
			{expr: `sum by (job) (holdfast_idempotency_active{$s})`, legend: "{{job}} running"},
			{expr: `sum by (job) (rate(holdfast_idempotency_fallbacks_total{$s}[$r]))`, legend: "{{job}} fallbacks per second", rare: true},
		}},
	}},
	{"Rate limits", []panel{
		{"Requests by outcome", "What the middleware answered, by the limit that denied.", "reqps", []query{
			{expr: `sum by (outcome, limit) (rate(holdfast_ratelimit_requests_total{$s}[$r]))`, legend: "{{outcome}} {{limit}}"},
		}},
		{"Decisions by source", "store: Redis decided. cache: a remembered denial. fallback or none: Redis could not be asked.", "reqps", []query{
			{expr: `sum by (outcome, source) (rate(holdfast_ratelimit_decisions_total{$s}[$r]))`, legend: "{{outcome}} {{source}}", servers: true},
		}},
		{"Decision, 99th percentile", "", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (le) (rate(holdfast_ratelimit_duration_seconds_bucket{$s}[$r])))`, legend: "99 %", servers: true},
		}},
		{"Units taken ahead", "What leased limiters hold and have not spent: a process that dies strands its part until it lapses.", "short", []query{
			{expr: `sum by (limit) (holdfast_ratelimit_leased{$s})`, legend: "{{limit}}", rare: true},
		}},
	}},
	{"Expiry", []panel{
		{"Expired", "Rows that sweeps expired, found settled by others, and put in quarantine.", "ops", []query{
			{expr: `sum by (holdfast_sweeper) (rate(holdfast_expiry_expired_total{$s}[$r]))`, legend: "{{holdfast_sweeper}} expired"},
			{expr: `sum by (holdfast_sweeper) (rate(holdfast_expiry_raced_total{$s}[$r]))`, legend: "{{holdfast_sweeper}} raced"},
			{expr: `sum by (holdfast_sweeper) (rate(holdfast_expiry_poisoned_total{$s}[$r]))`, legend: "{{holdfast_sweeper}} quarantined"},
		}},
		{"Lag", "How long the longest overdue row had been due: when it was expired, and at the last look.", "s", []query{
			{expr: `histogram_quantile(0.99, sum by (holdfast_sweeper, le) (rate(holdfast_expiry_lag_seconds_bucket{$s}[$r])))`, legend: "{{holdfast_sweeper}} expired, 99 %"},
			{expr: `max by (holdfast_sweeper) (holdfast_expiry_overdue_age_seconds{$s})`, legend: "{{holdfast_sweeper}} overdue"},
		}},
		{"Rows overdue", "At the last look, up to 10,000. Undated rows never expire.", "short", []query{
			{expr: `max by (holdfast_sweeper) (holdfast_expiry_overdue{$s})`, legend: "{{holdfast_sweeper}} overdue"},
			{expr: `max by (holdfast_sweeper) (holdfast_expiry_undated{$s})`, legend: "{{holdfast_sweeper}} undated"},
		}},
		{"Sweeps", "", "ops", []query{
			{expr: `sum by (holdfast_sweeper) (rate(holdfast_expiry_sweep_duration_seconds_count{$s}[$r]))`, legend: "{{holdfast_sweeper}}"},
		}},
		{"Next sweep or look", "Seconds from now. Below zero: the sweeper is at work, or gets no answer.", "s", []query{
			{expr: `min by (holdfast_sweeper) (holdfast_expiry_next_seconds{$s}) - time()`, legend: "{{holdfast_sweeper}}"},
		}},
		{"Clock", "The host's clock less the store's. Only the store's decides.", "s", []query{
			{expr: `max by (holdfast_sweeper, instance) (abs(holdfast_expiry_clock_skew_seconds{$s}))`, legend: "{{instance}}"},
		}},
	}},
	{"Upkeep", []panel{
		{"Pruned rows", "What was deleted because its retention is over.", "ops", []query{
			{expr: `sum by (job) (rate({__name__=~"holdfast_.+_pruned_total",$s}[$r]))`, legend: "{{job}}", rare: true},
		}},
	}},
}

package main

// bug is a mistake that somebody could make.
type bug struct {
	name string
	file string
	old  string // occurs once in the file
	new  string
	by   check
}

// check is the test that must find the bug.
type check struct {
	pkg, run string // of go test; empty: the simulation
}

var simulation = check{}

// enumerated are all schedules of the simulation with at most two faults.
var enumerated = suite("internal/lab/sim", "^TestEnumerated$")

func suite(pkg, run string) check { return check{"./" + pkg, run} }

// bugs that the simulation must catch come first.
var bugs = []bug{
	{
		"a message is published before the broker confirms", "outbox/pipeline.go",
		"\t\tr := result{index: i, err: err}\n", "\t\tr := result{index: i}\n", simulation,
	},
	{
		"what was not sent counts as published", "outbox/pipeline.go",
		"\tcase r.unsent:\n", "\tcase r.unsent:\n\t\toutcomes[r.index] = outcome{done: true}\n", enumerated,
	},
	{
		"what was not confirmed in time counts as published", "outbox/pipeline.go",
		"\tp.open = 0\n\tif p.life", "\tp.open = 0\n\tfor i := range outcomes {\n\t\toutcomes[i].done = true\n\t}\n\tif p.life", simulation,
	},
	{
		"the next of a key is sent before the confirm", "outbox/pipeline.go",
		"if m.Key != \"\" && inFlight[m.Key] {", "if false {", simulation,
	},
	{
		"a failed message does not hold back its key", "outbox/outboxtest/source.go",
		"held[e.Key] = e.Key != \"\"", "held[e.Key] = false", simulation,
	},
	{
		"a failed message is published", "outbox/round.go",
		"\t\tcase o.err == nil:\n", "\t\tcase o.err == nil || rs.failure(m, o.err).class == driver.Retryable:\n", simulation,
	},
	{
		"a relay looks only when it is woken", "outbox/dispatcher.go",
		"\t\tcase <-timer.C:\n", "\t\tcase <-make(chan int):\n", simulation,
	},
	{
		"dedup in a transaction of its own", "inbox/internal/memory/memory.go",
		"\t\tif first {\n\t\t\te.remove(of)\n\t\t}\n\t})\n\treturn", "\t})\n\treturn", simulation,
	},
	{
		"a duplicate is handled", "inbox/inboxpgx/process.go",
		"\tif !first {\n\t\treturn errNoEntry\n\t}\n", "\t_ = first\n", simulation,
	},
	{
		"a failed message is acknowledged", "inbox/engine/outcome.go",
		"\t\tcase it.outcome == nil:\n", "\t\tcase it.outcome == nil || it.outcome.kind == failed:\n", simulation,
	},
	{
		"a message is acknowledged before its transaction", "inbox/inboxpgx/process.go",
		"\t\terr := s.transactor.DoWith(ctx, opts, d.attempt)\n",
		"\t\tgo s.transactor.DoWith(context.WithoutCancel(ctx), opts, d.attempt)\n\t\tvar err error\n", simulation,
	},
	{
		"messages of a lost session are not delivered again", "inbox/internal/memqueue/source.go",
		"\t\th.giveBack(d)\n", "\t\th.settle(d)\n", simulation,
	},
	{
		"a message that fails again is published", "outbox/round.go",
		"\t\tcase o.err == nil:\n", "\t\tcase o.err == nil || m.Attempts > 0:\n", enumerated,
	},
	{
		"an unanswered COMMIT of a repeated attempt is taken for success", "txretry/attempt.go",
		"\treturn result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: phaseCommit, lost: err, xid: t.session.XID()}\n",
		"\tif c.attempts > 1 {\n\t\treturn result{}\n\t}\n" +
			"\treturn result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: phaseCommit, lost: err, xid: t.session.XID()}\n", enumerated,
	},
	{
		"the engine asks for no turn", "inbox/engine/loop.go",
		"\tif at.After(a.now) && (a.at.IsZero()", "\tif false && (a.at.IsZero()", suite("inbox/engine", "^TestOrderedRetries$"),
	},
	{
		"a consumer ends with its session", "inbox/engine/loop.go",
		"\t\tl.ended(ev, now)\n", "\t\tl.ended(ev, now)\n\t\tl.finish(now, \"\")\n", simulation,
	},
	{
		"a refused COMMIT is taken for success", "txretry/attempt.go",
		"\tcase driver.RolledBack:\n\t\tc.outcome = driver.RolledBack\n\t\tres := c.failedIn(phaseCommit, err)\n",
		"\tcase driver.RolledBack:\n\t\treturn result{}\n\t\tres := c.failedIn(phaseCommit, err)\n", simulation,
	},
	{
		"an unanswered COMMIT is taken for success", "txretry/attempt.go",
		"\treturn result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: phaseCommit, lost: err, xid: t.session.XID()}\n",
		"\treturn result{}\n", simulation,
	},
	{
		"statements for COMMIT are lost when an attempt is repeated", "txretry/attempt.go",
		"\toutcome, err := t.session.Commit((*detached)(&t.ctx), c.opts.CommitTimeout, t.pending.atCommit())\n",
		"\tif c.attempts > 1 {\n\t\tt.pending.statements = nil\n\t}\n\toutcome, err := t.session.Commit((*detached)(&t.ctx), c.opts.CommitTimeout, t.pending.atCommit())\n", simulation,
	},
	{
		"the answer is not stored with its effect", "idempotency/idempotencypgx/run.go",
		"\t\treturn s.records.Insert(ctx, tx, rec)\n", "\t\treturn nil\n", simulation,
	},
	{
		"the answer is given to the gate before COMMIT", "idempotency/idempotencypgx/run.go",
		"\t\treturn s.records.Insert(ctx, tx, rec)\n", "\t\tsettle(claim, rec)\n\t\treturn s.records.Insert(ctx, tx, rec)\n", simulation,
	},
	{
		"a failure is believed without a look for the record", "idempotency/idempotencypgx/run.go",
		"\trec, found, err := find(ctx, claim.Key)\n", "\trec, found, err := find(ctx, claim.Key)\n\tfound = false\n", simulation,
	},
	{
		"another request with the same key gets the answer", "idempotency/driver/driver.go",
		"f.Version == other.Version && body != otherBody", "false && body != otherBody", simulation,
	},
	{
		"a replay answers with status 200", "idempotency/middleware.go",
		"\tx.w.Header().Set(ReplayedHeader, \"true\")\n", "\tx.w.Header().Set(ReplayedHeader, \"true\")\n\tout.Response.Status = 200\n", simulation,
	},
	{
		"a sweeper expires what is not due", "expiry/expirytest/store.go",
		"r.Deadline.IsZero() || r.Deadline.After(now) ||", "r.Deadline.IsZero() || r.Deadline.After(now.Add(2*time.Second)) ||", simulation,
	},
	{
		"a sweeper that failed once does not sweep again", "expiry/sweeper.go",
		"\t\tfailures++\n", "\t\tfailures++\n\t\t<-ctx.Done()\n", simulation,
	},
	{
		"a sweeper that failed once ends", "expiry/sweeper.go",
		"\t\tfailures++\n", "\t\treturn nil\n", simulation,
	},
	{
		"a sweeper does not look when the next hold is due", "expiry/waiter.go",
		"\tif pending && due <= w.s.cfg.PollInterval {\n", "\tw.look = now.Add(time.Hour)\n\tif pending && due < 0 {\n", simulation,
	},
	{
		"a sweeper's helper outlives it", "expiry/sweeper.go",
		"\t\tcancel()\n\t\t<-ended\n", "\t\tgo func() { select {} }()\n\t\tcancel()\n\t\t<-ended\n", simulation,
	},
	{
		"a seat is taken that somebody holds", "examples/reservation/internal/booking/hold.go",
		"\t\tif seat.StateAt(now) != SeatFree {\n", "\t\tif seat.StateAt(now) == SeatConfirmed {\n", simulation,
	},
	{
		"a hold is confirmed after its deadline", "examples/reservation/internal/booking/booking.go",
		"switch status := r.StatusAt(now); status {", "switch status := r.Status; status {", simulation,
	},
	{
		"a refund gives back two units", "ratelimit/limit.go",
		"\tcost = min(cost, r.most) //", "\tcost = min(2*cost, r.most) //", simulation,
	},
	{
		"the window before does not count", "ratelimit/limit.go",
		"\treturn c.Prev*(r.w-elapsed) + c.Cur*r.w\n", "\treturn c.Cur * r.w\n", simulation,
	},
	{
		"a request about which the limiter could say nothing passes", "ratelimit/middleware.go",
		"\tproblem.Write(w, p)\n}\n\nfunc writeDenied", "\th.next.ServeHTTP(w, r)\n}\n\nfunc writeDenied", simulation,
	},
	{
		"a sweeper takes a minute to end", "expiry/sweeper.go",
		"\t\tcancel()\n\t\t<-ended\n", "\t\ttime.Sleep(time.Minute)\n\t\tcancel()\n\t\t<-ended\n", simulation,
	},

	{
		"a settlement does not check the fencing token", "outbox/outboxpgx/migrations/0006_outbox_relay.sql",
		"ON l.lane = b.lane AND l.token = b.token\n", "ON l.lane = b.lane\n", suite("outbox/outboxpgx", "^TestConformance$"),
	},
	{
		"a settlement changes messages of lanes that it does not hold", "outbox/outboxpgx/migrations/0006_outbox_relay.sql",
		"DELETE FROM {{table}} o WHERE o.id = ANY(published) AND o.lane = ANY(ours);", "DELETE FROM {{table}} o WHERE o.id = ANY(published);",
		suite("outbox/outboxpgx", "^TestConformance$"),
	},
	{
		"a DELETE that a trigger drops is taken for done", "outbox/outboxpgx/migrations/0006_outbox_relay.sql",
		"    IF n < cardinality(published) THEN\n", "    IF keep AND published <> '{}' THEN\n", suite("outbox/outboxpgx", "^TestIgnoredOutcome_isNotPublishedAgain$"),
	},
	{
		"an INSERT that a trigger drops is taken for a write", "outbox/outboxpgx/write.go",
		"count(*) < 1 THEN", "count(*) < 0 THEN", suite("outbox/outboxpgx", "^TestIgnoredChange_isAnErrorAndChangesNothing$"),
	},
	{
		"a key that a trigger routes is taken for a duplicate", "outbox/outboxpgx/write.go",
		"case err == nil && !routed:", "case err == nil:", suite("outbox/outboxpgx", "^TestWriteOnce_routedKeyIsIgnored$"),
	},
	{
		"one outcome that is refused decides for its batch", "outbox/outboxpgx/settle.go",
		"if sqlstate.Refused(err) {", "if false {", suite("outbox/outboxpgx", "^TestRefusedOutcome_leavesTheOthers$"),
	},
	{
		"an error that a trigger raises for one row decides for its batch", "internal/sqlstate/sqlstate.go",
		"\t\"40001\",", "\t\"55000\", \"40001\",", suite("outbox/outboxpgx", "^TestRefusedOutcome_leavesTheOthers$"),
	},
	{
		"a constraint that fails at COMMIT decides for its batch", "outbox/outboxpgx/migrations/0006_outbox_relay.sql",
		"        SET CONSTRAINTS ALL IMMEDIATE;", "       ", suite("outbox/outboxpgx", "^TestRefusedOutcome_leavesTheOthers$"),
	},
	{
		"a failed assertion decides for its batch", "outbox/outboxpgx/migrations/0006_outbox_relay.sql",
		"WHEN OTHERS OR assert_failure THEN", "WHEN OTHERS THEN", suite("outbox/outboxpgx", "^TestRefusedOutcome_leavesTheOthers$"),
	},
	{
		"one dead letter that is refused ends a replay", "internal/deadletter/steps.go",
		"\tcase c.done.Failed >= maxRefused:\n", "\tcase true:\n", suite("outbox/outboxpgx", "^TestRefusedDeadLetter_leavesTheOthers$"),
	},
	{
		"one row that is refused ends the pruning", "internal/pgprune/pgprune.go",
		"return 0, s.leave(ctx, 1, err)", "return 0, err", suite("internal/pgprune", "^TestPrune_leavesRowsThatAreRefused$"),
	},
	{
		"a trigger for DELETE that returns NEW is not found", "internal/pgcheck/pgcheck.go",
		"case b.deletes && !old:", "case false && old:", suite("internal/pgcheck", "^TestDrops_namesTheCause$"),
	},
	{
		"a row that a trigger makes active again is announced", "expiry/expirypgx/store.go",
		"if changed != len(rows) || still > 0 {", "if changed != len(rows) {", suite("expiry/expirypgx", "^TestRowsThatDoNotChange$"),
	},
	{
		"a dead letter is as old as its id", "inbox/driver/deadletters.go",
		"wire.PublishedAt(d.Message.PublishedAt, nil,", "wire.PublishedAt(time.Time{}, nil,", suite("inbox/driver", "^TestReplayRefuses$"),
	},
	{
		"what a claim skips is not under suspicion", "outbox/outboxtest/source.go",
		"range s.ready(nil) {", "range s.ready([]string{\"away\"}) {", suite("outbox/outboxtest", "^TestStore$"),
	},
	{
		"a relay looks before its settlement is committed", "outbox/outboxpgx/settle.go",
		"\tqueue.Queue(commitGoOnSQL).Exec(", "\tqueue.Queue(`SELECT`).Exec(", suite("outbox/outboxpgx", "^TestSettle_checksForMoreAfterCommit$"),
	},
	{
		"what came while its lane was leased is left", "outbox/dispatcher.go",
		"if r.more || d.limit > 0 {", "if d.limit > 0 {", suite("outbox", "^TestRelay_claimsMessagesCommittedDuringBatch$"),
	},
	{
		"the lanes of a killed relay wait for a poll", "outbox/outboxtest/source.go",
		"soonest(s.promote(now), s.leaseEnds(now))", "s.promote(now)", suite("outbox", "^TestRelay_takesOverLanesOfKilledRelay$"),
	},
	{
		"a floor rises above an open transaction", "outbox/outboxpgx/horizon.go",
		"return h.safe + 1, h.era", "return h.seen + 1, h.era", suite("outbox/outboxpgx", "^TestFloorsWaitForOpenTransactions$"),
	},
	{
		"a pause of a transport has no end", "outbox/transport.go",
		"\tif !answered {\n\t\tb.pause.trying = false\n", "\tif !answered {\n", suite("outbox", "^TestBreaker_probesAgainAfterUnusedTry$"),
	},
	{
		"leases are not renewed", "outbox/round.go",
		"\tfirst := begin.Add(rs.cfg.LeaseTTL / renewalsPerLease)\n", "\tfirst := begin.Add(rs.cfg.LeaseTTL * 1000)\n", suite("outbox", "^TestSlowBatchKeepsItsLanes$"),
	},
	{
		"an unknown COMMIT is tried again", "txretry/attempt.go",
		"phase: phaseCommit, lost: err, xid: t.session.XID()}", "phase: phaseCommit, again: true}", suite("txretry", "^TestCommitReplyLost$"),
	},
	{
		"effects after a commit run after a rollback, too", "txretry/pending.go",
		"c.outcome != driver.Committed {", "c.outcome == driver.Unknown {", suite("txretry", "^TestConformance$"),
	},
	{
		"Check overlooks a DateStyle that pgx cannot read", "internal/pgcheck/pgcheck.go",
		"len(dates) < 3 || dates[:3] != \"ISO\"", "len(dates) < 3", suite("internal/pgcheck", "^TestSettings_workOrAreReported$"),
	},
	{
		"Migrate wants the right to create although nothing is to be done", "internal/migrate/migrate.go",
		"if s.done(ctx, conn, versions, files) {", "if false {", suite("modules/operator", "^TestGrants_migrate$"),
	},
	{
		"a new file of the schema has a number below those that are there", "modules/operator/command/schema.go",
		"\t\t\thighest = max(highest, number)\n", "", suite("modules/operator/cmd/holdfast", "^TestHoldfast_schemaFiles$"),
	},
	{
		"a server ends the session that listens because it is idle", "internal/pgnotify/pgnotify.go",
		"WHERE name = 'idle_session_timeout'", "WHERE name = ''", suite("internal/pgnotify", "^TestListen_outlivesIdleSessionTimeout$"),
	},
	{
		"a server that refuses writes is no outage", "internal/sqlstate/sqlstate.go",
		" || RefusesWrites(err)", "", suite("idempotency/idempotencypgx", "^TestReadOnlyServer_answers503$"),
	},
	{
		"a deferred statement waits across a savepoint of the user", "txretry/pending.go",
		"\tif !p.anyText && tame() {\n", "\tif p.anyText || tame() || true {\n", suite("txretry", "^TestDeferred_belongsToTheSavepoint$"),
	},
	{
		"a text with a savepoint behind its first statement is taken for plain", "txretry/pending.go",
		"strings.IndexByte(sql, ';') < 0 && ", "", suite("txretry", "^(TestDeferred_belongsToTheSavepoint|TestIsPlain_onlyRowStatements)$"),
	},
	{
		"a function runs although its savepoint was rolled back", "txretry/pending.go",
		"\tp.gone = append(p.gone, marks)\n", "\tp.gone = append(p.gone, false)\n", suite("txretry", "^TestEffectsStayTogether$"),
	},
	{
		"what was sent inside a savepoint that is rolled back is lost", "txretry/handle.go",
		"\tt.restore(sp.pending)\n", "", suite("txretry", "^TestEffectsStayTogether$"),
	},
	{
		"the retry budget never forgets a conflict", "txretry/budget.go",
		"\t\tb.recent.add(*oldest, -1)\n", "", suite("txretry", "^TestBudget_healsWithTime$"),
	},
	{
		"over the retry budget no call is a probe", "txretry/budget.go",
		"if b.over && b.running > 0 {", "if b.over {", suite("txretry", "^TestBudget_refusesAboveItsShare$"),
	},
	{
		"the lock timeout is not set", "txretry/attempt.go",
		"\tparts = appendTimeout(parts, \"lock_timeout\", k.lockTimeout)\n", "", suite("txretry", "^TestBeginMessage$"),
	},
	{
		"a silent BEGIN is waited for too long", "txretry/config.go",
		"begin: 2 * time.Second", "begin: 9 * time.Second", suite("txretry", "^(TestSilentBegin|TestSilentPool)$"),
	},
	{
		"a broker that has vanished is waited for too long", "internal/amqpconn/conn.go",
		"pulsePatience = 5 * time.Second", "pulsePatience = 14 * time.Second", suite("internal/amqpconn", "^(TestSilentWhileIdle|TestSilentConnection)$"),
	},
	{
		"a silent try takes all the time of its caller", "internal/breaker/breaker.go",
		"Longest = 2 * time.Second", "Longest = 9 * time.Second", suite("idempotency/idempotencyredis", "^TestSilentInTheMiddleOfAScript$"),
	},
	{
		"an entry that is there counts as new", "inbox/inboxpgx/process.go",
		"return tag.RowsAffected() == 1, nil", "return true, nil", suite("inbox/inboxpgx", "^TestProcessorOnPostgres$"),
	},
	{
		"a sweep does not look at the status again", "expiry/expirypgx/store.go",
		"\" = ANY($1) AND \" + due + \" RETURNING \"", "\" = ANY($1) RETURNING \"", suite("expiry/expirypgx", "^TestOnlyDueVersionsOfARowChange$"),
	},
	{
		"a transaction does not heed that another one has its key", "idempotency/idempotencypgx/run.go",
		"at.locked = tag.RowsAffected() == 1", "at.locked = true", suite("idempotency/idempotencypgx", "^TestAttemptsClaimAnew$"),
	},
	{
		"a key is released by whoever asks", "idempotency/idempotencyredis/release.lua",
		"if redis.call('GET', KEYS[2]) ~= ARGV[1] then", "if false then", suite("idempotency/idempotencyredis", "^TestStore$"),
	},
	{
		"the lease of a key is not renewed", "idempotency/run.go",
		"r.lease/3-took, r.renew)", "r.lease*100, r.renew)", suite("idempotency", "^TestRenewals$"),
	},
	{
		"a unit is given back twice", "ratelimit/middleware.go",
		"\tt.done = true\n", "", suite("ratelimit", "^TestSecondRefundChangesNothing$"),
	},
	{
		"units that were taken ahead are given back, and spent all the same", "ratelimit/leased.go",
		"\t\t\te.units = 0\n", "", suite("ratelimit", "^TestLeasedAgainstModel$"),
	},
	{
		"limits are charged one by one", "ratelimit/ratelimitredis/decide.lua",
		"if ok == 1 and take == 1 then", "if take == 1 then", suite("ratelimit/ratelimitredis", "^TestDifferentialMemoryAndRedis$"),
	},
	{
		"a refused message counts as confirmed", "internal/amqpconn/window.go",
		"\tcase !ack:\n", "\tcase !ack && false:\n", suite("internal/amqpconn", "^TestNackedBehindOthers$"),
	},
	{
		"a large body is decoded on the goroutine that receives", "inbox/engine/io.go",
		"slow.Slow() {", "slow.Slow() && false {", suite("inbox/engine", "^TestOpener_slowBodiesHoldUpNobody$"),
	},
	{
		"a list of dead letters holds their bodies", "inbox/driver/deadletters.go",
		"left < 0 {", "left < -(1 << 40) {", suite("inbox/driver", "^TestList_boundsContentInBytes$"),
	},
	{
		"a message of a batch that Kafka rejected counts as rejected itself", "modules/kafka/outboxkafka/publisher.go",
		"if err != nil && ofMessage(err) {", "if false {", suite("modules/kafka/outboxkafka", "^TestPublish_onlyTheLargeMessageFails$"),
	},
	{
		"a text of several lines becomes a header as it is", "modules/watermill/foreign.go",
		"if !isName(name) || !isText(value) {", "if !isName(name) {", suite("modules/watermill", "^TestForeign_errorsEnterThePoisonQueue$"),
	},
	{
		"a connection without an address is refused whatever is configured", "ratelimit/clientip.go",
		"case !ok && len(c.TrustedProxies) == 0:", "case !ok:", suite("ratelimit", "^TestClientIP_overUnixSocket$"),
	},
	{
		"the relay stops beside the parts whose messages it publishes", "modules/service/group.go",
		"g.add(stageLast,", "g.add(stageAdd,", suite("modules/service", "^TestRun_stopsInOrder$"),
	},
	{
		"readiness does not fail before the listener closes", "modules/service/group.go",
		"\tg.enter(stopping)\n", "", suite("modules/service", "^TestRun_stopsInOrder$"),
	},
	{
		"a part that ends by itself is not missed", "modules/service/group.go",
		"case err == nil && ctx.Err() == nil:", "case false:", suite("modules/service", "^TestRun_endsWithAnyPart$"),
	},
	{
		"the shop waits for its broker before it serves", "examples/reservation/services.go",
		"\"postgres\", p.messages", "\"postgres\", p.broker.setup[0], p.messages", suite("examples/reservation", "^TestStart_withoutBroker$"),
	},
	{
		"a probe of a gRPC server needs an idempotency key", "modules/rpc/internal/once/guard.go",
		"!exchange.OfGRPC(procedure) && g.needs", "g.needs", suite("modules/rpc/idempotencygrpc", "^TestOnce$"),
	},
	{
		"a probe of a gRPC server is charged", "modules/rpc/internal/limit/guard.go",
		"if exchange.OfHealth(about.Procedure) {", "if false {", suite("modules/rpc/ratelimitconnect", "^TestLimits$"),
	},
	{
		"a page of dead letters of Redis is bounded by their number alone", "inbox/inboxredis/stream_page.lua",
		"while bytes < tonumber(ARGV[3]) and #page", "while #page", suite("inbox/inboxredis", "^TestDeadLetters_pagesHaveABoundInBytes$"),
	},
	{
		"a large entry of Symfony counts as quick to decode", "inbox/inboxredis/forms.go",
		"range [...]string{fieldPacked, fieldSymfony, fieldHeaders}", "range [...]string{fieldPacked}", suite("inbox/inboxredis", "^TestForms_largeOnesAreSlow$"),
	},
	{
		"an entry that the table ignored is a duplicate", "inbox/inboxpgx/process.go",
		"case !there[i]:", "case !there[i] && false:", suite("inbox/inboxpgx", "^TestIgnoredEntry_isNoDuplicate$"),
	},
	{
		"the effect of a record that the table ignored is committed", "internal/pgcall/pgcall.go",
		"SELECT CASE count(*) WHEN 1 THEN", "SELECT CASE WHEN true THEN", suite("idempotency/idempotencypgx", "^TestIgnoredRecord_commitsNothing$"),
	},
	{
		"a lost retry is waited for", "inbox/engine/work.go",
		" || entry.Overdue > overdueMargin {", " {", suite("inbox/engine", "^TestNewerCopyNoted$"),
	},
	{
		"a message of a stopped key runs", "inbox/inboxpgx/process.go",
		"key: s.parks.keyOf(call.Message)}", "}", suite("inbox/inboxpgx", "^TestParkedKey$"),
	},
	{
		"a key with a message becomes free", "inbox/inboxpgx/migrations/0004_inbox_stopped.sql",
		"PRIMARY KEY (consumer, message_id),\n    FOREIGN KEY (consumer, key) REFERENCES {{stopped}} (consumer, key)\n", "PRIMARY KEY (consumer, message_id)\n",
		suite("inbox/inboxpgx", "^TestParking_arrivalBesideTheEnd$"),
	},
	{
		"an arrival does not lock its key", "inbox/inboxpgx/parking.go",
		"consumer = $1 AND key = $3 FOR KEY SHARE", "consumer = $1 AND key = $3", suite("inbox/inboxpgx", "^TestParking_endBesideAnArrival$"),
	},
	{
		"a waiting message that ends the process is not counted", "inbox/inboxpgx/parking.go",
		"SET runs = w.runs + 1", "SET runs = w.runs", suite("inbox/inboxpgx", "^TestParkingOnPostgres$"),
	},
	{
		"a waiting message that may have ended the process runs beside others", "inbox/inboxpgx/drain.go",
		"n = drainers\n", "n = 1\n", suite("inbox/inboxpgx", "^TestParkedMessage_suspect$"),
	},
	{
		"a message that waits for a connection counts as one that ends the process", "inbox/inboxpgx/drain.go",
		"func() { giveUp(errLate) }", "func() { _ = giveUp }", suite("inbox/inboxpgx", "^TestParkedMessage_waitsForConnection$"),
	},
	{
		"a waiting message that a shutdown cancels counts as one that ends the process", "inbox/inboxpgx/drain.go",
		"keep := context.WithoutCancel(work)", "keep := work", suite("inbox/inboxpgx", "^TestParkedMessage_cancelledIsNoCrash$"),
	},
	{
		"a claim of a stopped key holds after the next one", "inbox/inboxpgx/parking.go",
		"key = $2 AND next_at = $3 FOR", "key = $2 AND (next_at = $3 OR true) FOR", suite("inbox/inboxpgx", "^TestParkingOnPostgres$"),
	},
	{
		"a waiting message that fails is dropped", "inbox/inboxpgx/drain.go",
		"err = place.Fail(ctx, h, inboxdriver.NewDeadLetter(h.Message, f, d.cfg.Name, now))", "_, err = place.Next(ctx, h, 0)", suite("inbox/inboxpgx", "^TestParkedMessage_fails$"),
	},
	{
		"a removed dead letter of a key leaves no entry", "inbox/inboxpgx/parking.go",
		"remove: letter(`INSERT INTO `+names.entries+` (consumer, message_id) SELECT $1, $2::uuid FROM found\n" +
			"\t\t\t\tON CONFLICT (consumer, message_id) DO UPDATE SET processed_at = now() RETURNING true`,",
		"remove: letter(`SELECT FROM found`,", suite("inbox/inboxpgx", "^TestParkingOnPostgres$"),
	},
	{
		"a dead letter of a key goes to the broker", "inbox/engine/outcome.go",
		"if o.target == driver.ToDead && l.cfg.parker != nil &&", "if false &&", suite("inbox/inboxpgx", "^TestParkedKey$"),
	},
	{
		"renewals wait for the pool", "idempotency/idempotencypgx/claims.go",
		"c.table.asker.renew(ctx, `", "c.table.asker.exec(ctx, false, `", suite("idempotency/idempotencypgx", "^TestLease_renewedBesideAFullPool$"),
	},
	{
		"an error counts as a replay", "idempotency/run.go",
		"return resp, s.replayed && err == nil, err", "return resp, s.replayed, err", suite("idempotency/idempotencytest", "^TestDo$"),
	},
	{
		"a delay queue keeps messages whose queue is gone", "inbox/inboxamqp/topology.go",
		"amqp.Table{\"alternate-exchange\": lostName}", "nil", suite("inbox/inboxamqp", "^TestDelays_lostTargetBlocksNobody$"),
	},
	{
		"queues of dead letters have the broker's own delivery limit", "inbox/inboxamqp/topology.go",
		"\tif kind == quorum {\n", "\tif kind == quorum && q.use == own {\n", suite("inbox/inboxamqp", "^TestSetup_deliveryLimitOfAllQueues$"),
	},
	{
		"a limit sends away a name that has the queue for itself", "inbox/engine/queues.go",
		"l.full() && !l.owns(it.m.Name, now)", "l.blocked > l.cfg.Prefetch/2", suite("inbox/engine", "^TestLimit_holdsBackAndMovesNothing$"),
	},
	{
		"suspects of several partitions run side by side", "internal/inbox/group/group.go",
		"each.Solo = g.consumer, &engine.Solo{}", "each.Solo = g.consumer, nil", suite("inbox/internal/group", "^TestSuspects_runAloneInTheProcess$"),
	},
	{
		"a process keeps the partitions that it was served first", "internal/inbox/group/group.go",
		"if len(served) < 2 {", "if len(served) < 99 {", suite("inbox/internal/group", "^TestLeveling_followsTheProcesses$"),
	},
	{
		"messages above the limit of all partitions are processed", "internal/inbox/group/processor.go",
		"n = min(n, s.left)", "s.left = max(s.left, n)", suite("inbox/internal/group", "^TestLimits$"),
	},
	{
		"a sender's header is taken for the broker's", "internal/wire/wire.go",
		"	switch name {\n	case HeaderRoutes, \"BCC\"", "	if len(name) > 2 && name[:2] == \"x-\" {\n		return true\n	}\n	switch name {\n	case HeaderRoutes, \"BCC\"",
		suite("inbox/inboxamqp", "^TestConsume$"),
	},
	{
		"retries outlast what the processor remembers", "inbox/driver/consumer.go",
		"d.Retention() < Horizon(c.Retry) {", "d.Retention() < 0 {", suite("inbox/engine", "^TestRun_refusesSettingsThatCannotWork$"),
	},
}

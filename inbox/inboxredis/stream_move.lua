-- Stores a copy of an entry and removes the original, if the caller still has it.
-- KEYS[1]: the entry's stream; KEYS[2]: the destination; KEYS[3]: the lease. ARGV[1]: the group; ARGV[2]: the token of the
-- lease, or ''; ARGV[3]: the consumer name; ARGV[4]: the entry's id; ARGV[5]: the delay (ms) of the copy, or '' for a
-- stream; then fields.
-- Returns 1; 0 if nobody has the entry, because the client repeats a call; -1 if another consumer has it.
-- Nobody has an entry that was deleted while it was processed: the copy is all that is left of it. If an entry was trimmed
-- before the client repeats a call, two copies are stored and nothing is lost.
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[2] then
  return -1
end
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[4], ARGV[4], 1)
if #pending == 0 and #redis.call('XRANGE', KEYS[1], ARGV[4], ARGV[4]) == 1 then
  return 0
end
if #pending == 1 and pending[1][2] ~= ARGV[3] then
  return -1
end
-- The copy comes first: without memory Redis rejects it, but would still remove the original.
if ARGV[5] == '' then
  redis.call('XADD', KEYS[2], '*', unpack(ARGV, 6))
else
  local now = redis.call('TIME')
  local due = now[1] * 1000 + math.ceil(now[2] / 1000) + ARGV[5]
  redis.call('ZADD', KEYS[2], string.format('%.0f', due), cmsgpack.pack({KEYS[1] .. ' ' .. ARGV[4], unpack(ARGV, 6)}))
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[4])
return 1

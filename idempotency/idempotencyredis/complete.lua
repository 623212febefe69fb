-- Stores the response and ends the lease. A repeated call changes nothing.
-- KEYS: record, lock. ARGV: token, fingerprint version, fingerprint, code, headers, body, retention (ms),
-- 1 to write the field response.
local rec = redis.call('HMGET', KEYS[1], 'status', 'token', 'code')
if rec[1] == 'completed' then -- a repeated call, or another system ignored the lock: its answer stays
  return rec[2] == ARGV[1] and rec[3] and 1 or 0
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'status', 'completed', 'token', ARGV[1], 'fpv', ARGV[2], 'fp', ARGV[3],
  'code', ARGV[4], 'hdr', ARGV[5], 'body', ARGV[6])
if ARGV[8] == '1' then
  redis.call('HSET', KEYS[1], 'response', ARGV[6])
end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('DEL', KEYS[2])
return 1

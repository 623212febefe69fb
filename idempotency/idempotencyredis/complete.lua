-- Stores the response and ends the lease. Said twice, it is done once.
-- KEYS: record, lock. ARGV: token, fingerprint version, fingerprint, code, headers, body, retention (ms),
-- now (s), 1 to write the field response.
local token = ARGV[1]
if redis.call('HGET', KEYS[1], 'status') == 'completed' then -- said again; or another system did not ask for the lock, and its answer stays
  return redis.call('HGET', KEYS[1], 'token') == token and 1 or 0
end
local holder = redis.call('GET', KEYS[2])
if not holder or string.sub(holder, 1, #token + 1) ~= token .. ':' then
  return 0
end
redis.call('HSET', KEYS[1], 'status', 'completed', 'token', token, 'fpv', ARGV[2], 'fp', ARGV[3],
  'code', ARGV[4], 'hdr', ARGV[5], 'body', ARGV[6], 'created', ARGV[8])
if ARGV[9] == '1' then
  redis.call('HSET', KEYS[1], 'response', ARGV[6])
end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('DEL', KEYS[2])
return 1

-- Claims the key, or tells who has it.
-- KEYS: record, lock. ARGV: the lock's value (token:version:fingerprint), lease (ms).
local rec = redis.call('HMGET', KEYS[1], 'status', 'fpv', 'fp', 'code', 'hdr', 'body')
if rec[1] == 'completed' then
  if not rec[4] then -- by another system
    rec[7] = redis.call('HGET', KEYS[1], 'response')
  end
  return rec
end
if rec[1] and rec[1] ~= 'processing' then -- by another system, or a later version: it may mean "done"
  return {'unknown'}
end
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) then
  if rec[1] then -- of a run that has lost the key
    redis.call('DEL', KEYS[1])
  end
  return 1
end
local holder = redis.call('GET', KEYS[2])
if holder == ARGV[1] then -- asked again
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return 1
end
local left = redis.call('PTTL', KEYS[2])
if left < 0 then -- a lock without an end would hold the key for ever
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  left = ARGV[2]
end
local version, sum = string.match(holder, '^[^:]*:(%d+):(%x+)$')
if not sum or #sum ~= 64 then -- another system's; its record may tell
  version, sum = false, false
  if redis.call('HGET', KEYS[1], 'token') == holder then
    version, sum = rec[2], rec[3]
  end
end
return {'processing', version, sum, tostring(left)}

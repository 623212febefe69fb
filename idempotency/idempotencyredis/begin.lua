-- Claims the key, or tells who has it.
-- KEYS: record, lock. ARGV: token, fingerprint version, fingerprint, lease (ms).
local rec = redis.call('HMGET', KEYS[1], 'status', 'token', 'fpv', 'fp', 'code', 'hdr', 'body', 'response')
if rec[1] == 'completed' then
  return {'completed', rec[3], rec[4], rec[5], rec[6], rec[7], rec[8]}
end
if rec[1] and rec[1] ~= 'processing' then -- by another system, or a later version: it may mean "done"
  return {'unknown'}
end
if not redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[4]) then
  local holder = redis.call('GET', KEYS[2])
  if holder ~= ARGV[1] then
    local left = redis.call('PTTL', KEYS[2])
    if left < 0 then -- a lock without an end would hold the key for ever
      redis.call('PEXPIRE', KEYS[2], ARGV[4])
      left = ARGV[4]
    end
    if rec[2] ~= holder then -- the record is an older claim's
      rec[3], rec[4] = false, false
    end
    return {'processing', rec[3], rec[4], tostring(left)}
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
if rec[1] then -- of a run that has lost the key
  redis.call('DEL', KEYS[1])
end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'status', 'processing', 'token', ARGV[1], 'fpv', ARGV[2], 'fp', ARGV[3],
  'created', now[1] .. string.format('%03d', math.floor(now[2] / 1000)))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'acquired'}
